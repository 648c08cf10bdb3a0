"""The openai SDK, with the tool loop that its users write: first question whole, second streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
from plan import LOOKUP, briefing, lookup, questions, tell, url

client: Any = openai.OpenAI(base_url=f"{url()}/v1", api_key="unused")
messages: list[Any] = [{"role": "system", "content": briefing()}]
answers = []


def answered(stream: bool) -> Any:
    asked: dict[str, Any] = {"model": "local", "messages": messages, "tools": [LOOKUP]}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as events:
        return events.get_final_completion().choices[0].message


for number, question in enumerate(questions()):
    messages.append({"role": "user", "content": question})
    while (message := answered(stream=number == 1)).tool_calls:
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "assistant", "content": message.content})
    answers.append(message.content)
tell(answers)
