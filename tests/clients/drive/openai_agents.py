"""The OpenAI Agents SDK on its default API, /v1/responses, with instructions that tell the time of each run."""

from __future__ import annotations

from typing import Any

import agents
import openai
from plan import briefing, lookup, questions, tell, url

agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{url()}/v1", api_key="unused"), use_for_tracing=False)
agents.set_tracing_disabled(True)
asked: list[str] = []


def instructions(_context: Any, _agent: Any) -> str:
    return briefing(len(asked))


clerk: Any = agents.Agent(name="clerk", model="local", instructions=instructions, tools=[agents.function_tool(lookup)])
history: list[Any] = []
answers = []
for question in questions():
    asked.append(question)
    done = agents.Runner.run_sync(clerk, [*history, {"role": "user", "content": question}])
    history = done.to_input_list()
    answers.append(done.final_output)
tell(answers)
