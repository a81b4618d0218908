"""A profile whose steps take what they take whatever their load."""

from pathlib import Path

PREFILL_STEP, DECODE_STEP = 0.1, 0.01
"""Seconds."""

PROFILE = """
name: tiny
model: none
gpu: none
source: made up
gpus: 1
ranks: 1
grid: tiny.csv
chunk: 500
kv_tokens: 100000
kv_bytes: 1000
max_running: {max_running}
network_bytes_per_s: 1000000
store_bytes_per_s: 1000000000
flip_s: 1
update_s: 2
"""


def write_tiny_profile(directory: Path, max_running: int) -> str:
    """Its path."""
    rows = [
        "phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms,comm_ms",
        f"prefill,500,0,{1000 * PREFILL_STEP},0,0,0,0",
        f"decode,1,0,{1000 * DECODE_STEP},0,0,0,0",
    ]
    (directory / "tiny.csv").write_text("\n".join(rows) + "\n")
    (directory / "tiny.yaml").write_text(PROFILE.format(max_running=max_running))
    return str(directory / "tiny.yaml")
