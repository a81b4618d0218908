"""mini-swe-agent on a task: mini_swe_program.py URL MODEL DIRECTORY. Prints how it ended, and all messages, as JSON."""

import json
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main(url: str, model: str, directory: str) -> None:
    endpoint = {"api_base": url + "/v1", "api_key": "none", "temperature": 0.0}
    agent = DefaultAgent(
        LitellmModel(model_name=f"openai/{model}", model_kwargs=endpoint, cost_tracking="ignore_errors"),
        LocalEnvironment(cwd=directory),
        system_template="You work with a shell.",
        instance_template="{{task}}",
        step_limit=6,
    )
    ended = agent.run("Write three lines, then hand in their number.")
    print(json.dumps({"ended": ended, "messages": agent.messages}))


if __name__ == "__main__":
    main(*sys.argv[1:])
