"""AutoGen's AssistantAgent, two tasks one after the other; its system message is written once."""

from __future__ import annotations

import asyncio
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from plan import briefing, lookup, questions, tell, url

ABILITIES: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def main() -> None:
    client = OpenAIChatCompletionClient(model="local", base_url=f"{url()}/v1", api_key="unused", model_info=ABILITIES)
    clerk: Any = AssistantAgent(
        "clerk", model_client=client, tools=[lookup], system_message=briefing(), reflect_on_tool_use=True
    )
    answers = []
    for question in questions():
        done = await clerk.run(task=question)
        answers.append(done.messages[-1].content)
    await client.close()
    tell(answers)


asyncio.run(main())
