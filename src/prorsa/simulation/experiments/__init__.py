"""Experiments on the simulator: the paper's evaluation again (`reproduce`), and what to book for a workload (`plan`)."""
