"""The LiteLLM SDK with the tool loop that its users write."""

from __future__ import annotations

import json
from typing import Any

import litellm
from plan import LOOKUP, briefing, lookup, questions, tell, url

messages: list[Any] = [{"role": "system", "content": briefing()}]
answers = []


def answered() -> Any:
    given: dict[str, Any] = {"messages": messages, "tools": [LOOKUP]}
    answer: Any = litellm.completion(model="openai/local", api_base=f"{url()}/v1", api_key="unused", **given)
    return answer.choices[0].message


for question in questions():
    messages.append({"role": "user", "content": question})
    while (message := answered()).tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append(message)
    answers.append(message.content)
tell(answers)
