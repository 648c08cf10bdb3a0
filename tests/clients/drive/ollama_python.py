"""ollama-python on its own API, the second question streamed."""

from __future__ import annotations

from typing import Any

import ollama
from plan import briefing, questions, tell, url

client: Any = ollama.Client(host=url())
messages: list[dict[str, str]] = [{"role": "system", "content": briefing()}]
answers = []
for number, question in enumerate(questions()):
    messages.append({"role": "user", "content": question})
    if number:
        text = "".join(part.message.content for part in client.chat(model="tiny", messages=messages, stream=True))
    else:
        text = client.chat(model="tiny", messages=messages).message.content
    messages.append({"role": "assistant", "content": text})
    answers.append(text)
tell(answers)
