"""CrewAI: two agents with a role of their own and one tool, two tasks one after the other."""

from __future__ import annotations

from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from plan import briefing, lookup, questions, tell, url

llm = LLM(model="openai/local", base_url=f"{url()}/v1", api_key="unused")
look: Any = tool("lookup")(lookup)
clerks = [
    Agent(role=role, goal="Find sheets.", backstory=briefing(), llm=llm, tools=[look], verbose=False)
    for role in ("Clerk of the first floor", "Clerk of the cellar")
]
tasks = [
    Task(description=question, expected_output="One line.", agent=clerk)
    for question, clerk in zip(questions(), clerks, strict=True)
]
done: Any = Crew(agents=clerks, tasks=tasks, verbose=False).kickoff()
tell([str(each.raw) for each in done.tasks_output])
