"""Where prompts come from: openings that the target continues into a whole user turn, and frames
around passages that it wrote. Everything here is made up for training; no evaluation set is used.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

_CHAT = (
    "|What|How|How do I|How can I|Why|Why do|Can you|Could you explain|Write|Write a|Write an|"
    "Tell me about|I am|I'm|I want to|I need|My|Give me|List|Explain|Describe|Compare|Imagine|"
    "Create|Help me|Is it|Should I|Please|Compose|Draft an email|Suppose|As a|You are|Act as|"
    "Design|Develop|What are the|What is the difference between|Discuss|Analyze|Identify|Provide|"
    "Summarize the plot of|Write a short story about|Write a poem about|Write a letter|Edit|"
    "Pretend|Rewrite|Generate|Suggest|Recommend|In one paragraph|Given the following|Classify|"
    "What would happen if|Do you|Have you|Let's|Hi|Hello,|Thanks|Could you|Evaluate|Extract|Outline"
)
_QA = (
    "who|Who|Who was|who wrote|who plays|when|When did|when was|where|Where is|where does|what|"
    "What is|What is the name of|what year|which|Which|how many|How many|how long|what does|"
    "who is the|when does|what type of|name the|the|is|what was the|who won|where was"
)
_NAMES = (
    "Anna Ben Carla Daniel Elena Frank Grace Hugo Irene Jack Kate Leo Maria Nora Oscar Paula Rob "
    "Sara Tom Uma Victor Wendy Yara Zoe Mr.~Lee Mrs.~Hill Emma Liam Ava Noah"
)
_MATHS_VERBS = (
    "has|buys|bought|sells|is|earns|works|wants to|needs|makes|drives|runs|reads|spent|went|gave|"
    "started|can|and|collects|bakes|plants|saves|walks"
)
_MATHS = (
    "A farmer|A train|A store|A bakery|There are|There were|If|If a car travels|In a class of|"
    "The sum of|Solve|Solve for x:|Calculate|Find the|Find the value of|What is|Simplify|"
    "A rectangle has|The price of|A school|Two|Three friends|Every|How much|A bag contains|"
    "Compute|Prove that|The ratio of|A box|At a"
)
_CODE = (
    "Write a Python function|Write a function|Write a program|Complete the following Python "
    "function:\n\n```python\ndef|Complete this function:\n```python\nfrom typing import List\n\n\n"
    "def|```python\ndef|def|Write a Python program to|Write code|Implement|Implement a function|"
    "Fix the bug in this code:\n```python\n|Here is a Python function|How do I|Write a solution to "
    "this problem:\n```python\n\ndef|Write a solution to the following problem:\n```python\n\n\n"
    "def|Create a class|Write a SQL query|Write a JavaScript function|Write unit tests|Explain "
    "this code:\n```python\n|Using Python,|Convert|Write a regular expression|What does this code "
    "do?\n```\n|Solve the problem below and pass its tests:\n```python\ndef"
)
_NEWS = (
    "The|A|In|On Monday,|On Friday,|Police|Officials|Scientists|Researchers|According to|After|"
    "When|It|He|She|They|Thousands|Last week|Two|Three|Manchester|London|New York|The president|"
    "The government|For|Former|One of the|The club|The actress|The coach|Its|More than|At least"
)
_SUMMARY = (
    "Summarize: |Summarise the following text:\n\n|Summarize this article: |Please summarize:\n|"
    "Give a short summary of this text: |Write a summary of the passage below.\n\n|TL;DR: |"
    "What are the main points of this article?\n\n|Shorten this text: |Summarize in two sentences: "
)
# Openings per language, and the parts of a German sentence: subject, verb, clause, end.
_FOREIGN = json.loads(Path(__file__).with_name("foreign.json").read_text())
_TRANSLATE = (
    "Translate {0} to English: |Translate from {0} to English: |Translate this {0} sentence into "
    "English: |Please translate to English: |What does this mean in English? |English translation "
    "of this {0} text: "
)
_TOPICS = (
    "a bridge|honey bees|a football final|the history of glass|a storm at sea|city gardens|a new "
    "phone|volcanoes|a school play|solar power|a lost dog|coffee|medieval castles|an election|"
    "electric cars|the human heart|a museum robbery|penguins|a rock band|deep-sea fish|tax law|"
    "a marathon|the moon|vaccines|a chess champion|rice farming|a bank failure|a train strike|"
    "wolves|bread baking|a space telescope|the printing press|a tennis match|earthquakes|a famous "
    "painter|online shopping|an airline|sleep|a river flood|dinosaurs|a film festival|"
    "plastic waste|a court case|tea|wind farms|a mountain rescue|the stock market|a cooking show|"
    "robots|forests"
)
_WRITE = (
    "Write a news report about {0}.|Write an encyclopedia article about {0}.|Write a detailed "
    "article about {0}.|Write three paragraphs about {0}.|Explain {0} to a student.|Write a story "
    "about {0}.|Write a magazine article about {0}, with quotes from people involved."
)
_AROUND = (
    "Summarize: {0}|Summarize the following text:\n\n{0}|{0}\n\nSummarize the text above in three "
    "sentences.|Rewrite this text in simpler words:\n\n{0}|Rewrite the text in a formal tone.\n\n"
    "{0}|Read the text and list its main points.\n\n{0}|Translate to German:\n{0}|Translate this "
    "text into French: {0}|What is the main idea of this text?\n\n{0}|Write a title and a short "
    "abstract for this text:\n\n{0}|Correct any mistakes in this text:\n{0}|Continue this text:\n\n"
    "{0}|Turn this text into a list of questions and answers:\n\n{0}|Shorten this: {0}"
)
_ASK = "Who|What|What is|When|Where|Which|How many|how|who|why|what|What does"

KINDS = ("chat", "qa", "maths", "code", "summary", "translation", "write", "passage", "ask", "file")
_SHARES = {
    "chat": 0.27,
    "qa": 0.10,
    "maths": 0.17,
    "code": 0.20,
    "summary": 0.08,
    "translation": 0.10,
    "write": 0.08,
}


@dataclass(frozen=True, slots=True)
class Opening:
    """`text` begins the user's turn; unless `complete`, the target goes on with it for at most
    `max_tokens`. `cut_ok`: a turn that did not end by itself may be used as well."""

    kind: str
    text: str
    max_tokens: int = 160
    complete: bool = False
    cut_ok: bool = False


def _pick(rng: random.Random, choices: str) -> str:
    return rng.choice(choices.split("|"))


def _translation(rng: random.Random) -> Opening:
    language = rng.choices(tuple(_FOREIGN["openings"]), (12, 2, 2, 1))[0]
    frame = _pick(rng, _TRANSLATE).format(language)
    if language == "German" and rng.random() < 0.4:
        subject, verb, clause, end = (rng.choice(part) for part in _FOREIGN["german"])
        tail = f", {end}" if end else ""
        return Opening("translation", f"{frame}{subject} {verb}, {clause}{tail}.", complete=True)
    begun = rng.choice(_FOREIGN["openings"][language])
    return Opening("translation", frame + begun, 60, cut_ok=True)


def opening(rng: random.Random) -> Opening:
    """A random beginning of a user turn."""
    kind = rng.choices(tuple(_SHARES), tuple(_SHARES.values()))[0]
    if kind == "qa":
        return Opening(kind, _pick(rng, _QA), 48)
    if kind == "maths":
        if rng.random() < 0.4:
            return Opening(kind, _pick(rng, _MATHS))
        name = rng.choice(_NAMES.split()).replace("~", " ")
        return Opening(kind, f"{name} {_pick(rng, _MATHS_VERBS)}")
    if kind == "code":
        return Opening(kind, _pick(rng, _CODE), 224, cut_ok=True)
    if kind == "summary":
        text = _pick(rng, _SUMMARY) + _pick(rng, _NEWS)
        return Opening(kind, text, rng.choice((160, 320, 448)), cut_ok=True)
    if kind == "translation":
        return _translation(rng)
    if kind == "write":
        text = _pick(rng, _WRITE).format(_pick(rng, _TOPICS))
        return Opening(kind, text, complete=True)
    return Opening(kind, _pick(rng, _CHAT))


def around(rng: random.Random, passage: str) -> Opening:
    """A long user turn about a passage; a third of them end in a question that the target asks."""
    if rng.random() < 0.33:
        return Opening("ask", f"{passage}\n{_pick(rng, _ASK)}", 40)
    return Opening("passage", _pick(rng, _AROUND).format(passage), complete=True)
