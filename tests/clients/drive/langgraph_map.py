"""LangGraph as map and reduce: four lanes at once, each a tool loop on the same briefing, and one that joins them."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from plan import briefing, lookup, questions, session, tell, url

model = ChatOpenAI(base_url=f"{url()}/v1", api_key="unused", model="local")  # type: ignore[arg-type, unused-ignore]
look = tool(lookup)
N_LANES = 4


class State(TypedDict):
    questions: list[str]
    answers: Annotated[list[str], operator.add]
    joined: str


def lane(asked: dict[str, Any]) -> dict[str, list[str]]:
    head = f"lane_id: lane-{session()}{asked['number']}\n{briefing()}"
    messages: list[Any] = [("system", head), ("user", asked["question"])]
    while (answer := model.bind_tools([look]).invoke(messages)).tool_calls:
        messages.append(answer)
        messages += [ToolMessage(look.invoke(c["args"]), tool_call_id=c["id"]) for c in answer.tool_calls]
    return {"answers": [str(answer.content)]}


def joined(state: State) -> dict[str, str]:
    question = "Say in one line what these have in common:\n" + "\n".join(state["answers"])
    return {"joined": str(model.invoke([("system", briefing()), ("user", question)]).content)}


def lanes(state: State) -> list[Send]:
    return [Send("lane", {"number": n, "question": question}) for n, question in enumerate(state["questions"])]


graph: Any = StateGraph(State)
graph.add_node("lane", lane)
graph.add_node("reduce", joined)
graph.add_conditional_edges(START, lanes, ["lane"])
graph.add_edge("lane", "reduce")
graph.add_edge("reduce", END)
asked = [f"{questions()[0]} (and sheet {n})" for n in range(N_LANES)]
done = graph.compile().invoke({"questions": asked, "answers": [], "joined": ""})
tell([*done["answers"], done["joined"]])
