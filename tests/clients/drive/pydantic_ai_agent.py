"""PydanticAI with an instruction that tells the time of each run, as its documentation shows."""

from __future__ import annotations

from typing import Any

from plan import BRIEFING, clock, lookup, questions, tell, url
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("local", provider=OpenAIProvider(base_url=f"{url()}/v1", api_key="unused"))
asked: list[str] = []


def now() -> str:
    return clock(len(asked))


agent: Any = Agent(model, instructions=[now, BRIEFING], tools=[lookup])
history: list[Any] = []
answers = []
for question in questions():
    asked.append(question)
    done = agent.run_sync(question, message_history=history)
    history = done.all_messages()
    answers.append(done.output)
tell(answers)
