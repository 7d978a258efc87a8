"""Prompts to measure with: six categories that are built in, and data sets in Spec-Bench's format.

Owns: the built-in prompts and the reader of data sets.  Does not know: what is measured with them.

The categories differ in how much of the answer can be guessed: extraction, code edits and summaries repeat their prompt, chat
hardly does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.types import RequestError

CATEGORIES = ("chat", "code", "maths", "summary", "extraction", "translation")


@dataclass(frozen=True)
class Workload:
    """One prompt.  ``messages`` are a conversation, each with ``role`` and ``content``; ``name`` is unique in its category."""

    category: str
    name: str
    messages: tuple[Mapping[str, str], ...]


def _ask(category: str, name: str, content: str) -> Workload:
    return Workload(category, name, ({"role": "user", "content": content.strip()},))


_CHAT = (
    _ask(
        "chat",
        "balcony",
        "I want to grow vegetables on a small balcony that gets four hours of sun. What should I start with, and why?",
    ),
    _ask(
        "chat",
        "interview",
        "I have a job interview tomorrow and feel nervous. Give me a plan for this evening and tomorrow morning.",
    ),
    Workload(
        "chat",
        "lighthouse",
        (
            {"role": "user", "content": "Tell me the start of a story about a lighthouse keeper who collects clocks."},
            {
                "role": "assistant",
                "content": "Every evening before he lit the lamp, Anselm wound his forty-one clocks, and no two of them agreed. He "
                "said that a man who lives alone needs a little argument in the house.",
            },
            {"role": "user", "content": "Go on: one night all the clocks stop at the same minute. What happens next?"},
        ),
    ),
)

_CODE = (
    _ask(
        "code",
        "intervals",
        "Write a Python function merge_intervals(intervals) that takes a list of (start, end) pairs and returns the "
        "merged, sorted pairs. Then show three calls with their results.",
    ),
    _ask(
        "code",
        "typing",
        """
Add type hints and docstrings to this Python class and change nothing else. Answer with the whole class.

class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.lines = {}

    def add(self, article, count=1):
        self.lines[article] = self.lines.get(article, 0) + count

    def remove(self, article):
        if article not in self.lines:
            raise KeyError(article)
        return self.lines.pop(article)

    def total(self, prices):
        return sum(prices[article] * count for article, count in self.lines.items())
""",
    ),
    _ask(
        "code",
        "mend",
        """
This JavaScript function should return the average of the even numbers in a list, but for some lists it returns NaN. Explain
why, and give the corrected function.

function averageOfEven(numbers) {
  let sum = 0;
  let count = 0;
  for (const number of numbers) {
    if (number % 2 === 0) {
      sum += number;
      count += 1;
    }
  }
  return sum / count;
}
""",
    ),
)

_MATHS = (
    _ask(
        "maths",
        "bakery",
        "A bakery bakes 240 rolls. In the morning it sells three eighths of them, at noon 40 % of the rest, and in the "
        "evening it packs what is left in bags of 6. How many bags are full, and how many rolls remain? Work step by "
        "step.",
    ),
    _ask(
        "maths",
        "tank",
        "A tank holds 900 litres. Pump A fills 12 litres a minute and pump B 18 litres a minute, while a leak loses 5 "
        "litres a minute. Pump A starts first, pump B ten minutes later. After how many minutes is the tank full? Work "
        "step by step.",
    ),
    _ask(
        "maths",
        "quadratic",
        "Solve x^2 - 7x + 10 = 0 by factoring and again by the quadratic formula, writing down every step, and check "
        "both solutions.",
    ),
)

_SUMMARY = (
    _ask(
        "summary",
        "tram",
        """
Summarise this text in three sentences.

The town of Hollern reopened its tram line on Saturday after nineteen months of work. The line, which had carried
passengers since 1911, was closed when inspectors found that the bridge over the Weide could no longer bear the weight
of modern cars. The council first planned to replace the tram with buses, but a petition gathered eleven thousand
signatures, almost a third of the town's inhabitants, and the plan was dropped. The new bridge cost 14 million, four
million more than estimated, mainly because the foundations of an older mill were discovered under the northern bank and
had to be excavated first. Archaeologists now want to show the finds in the old depot. On the first day the cars were so
full that many people walked beside them, and the mayor, who had voted for the buses, admitted in her speech that she
had been wrong. From Monday the tram runs every twelve minutes, and every twenty after eight in the evening.
""",
    ),
    _ask(
        "summary",
        "bees",
        """
Summarise the findings of this report in five short bullet points.

For two summers we counted wild bees on thirty-six green roofs and on thirty-six meadows at ground level nearby. We
found 61 species on the meadows and 44 on the roofs; only three lived on the roofs alone. The height of the building
mattered less than we expected: up to the fifth floor numbers hardly fell, above it they halved. The depth of the soil
mattered most. Roofs with less than eight centimetres of soil had a third of the species of roofs with fifteen
centimetres or more, since most wild bees nest in the ground. Roofs that were watered in July flowered three weeks
longer and had twice as many bees in August. Planting exotic flowers made no difference to the number of species,
although it raised the number of honey bees, which come from hives and fly far. The cost of seven more centimetres of
soil is about four per cent of the cost of a roof, if the building can bear the weight.
""",
    ),
    _ask(
        "summary",
        "minutes",
        """
Write a short summary of these minutes for colleagues who were absent. Name each decision and who is to carry it out.

Dana opened the meeting at nine. Ravi reported that the new warehouse in Lund will be ready in March rather than in
January because the sprinklers failed their inspection. Until then the old warehouse stays open; Ravi will prolong its
lease. Mei asked who pays for the second night shift. After some discussion it was decided that sales will pay until the
end of December, and that Mei will write down the hours each week. Tomas showed the complaints of the last quarter: 212,
of which 140 were about late parcels. He proposed to change the carrier. Dana was against it before Christmas. It was
decided that Tomas will ask two other carriers for offers by the tenth of November and that the question will be settled
in January. Ravi said that the forklift course had room for four more people, and Dana asked everyone to name somebody
by Friday. The meeting closed at ten past ten.
""",
    ),
)

_INSPECTION = """
Inspection report, harbour district. On 3 March 2021 the inspectors Helga Brandt and Omar Siddiqui visited the
warehouses of Nordkai Storage Ltd at 14 Quay Street. The visit had been announced on 19 February 2021 in a letter to the
managing director, Petra Lindqvist. Ms Lindqvist was travelling, and her deputy, Jonas Adeyemi, accompanied the
inspectors through all four halls.

Hall 1 holds timber. The sprinkler system was last serviced on 11 May 2019 by Tidewater Fire Safety, who charged 2,350
euros; the rule asks for a service every twelve months. Mr Adeyemi said that a service had been ordered for 6 April 2020
and was then cancelled by the contractor. The inspectors set a fine of 800 euros and a deadline of 15 April 2021 for a
new service.

Hall 2 was empty on the day of the visit, because its roof is being renewed. The work is done by Castellan Roofing,
whose foreman, Luca Moretti, showed the scaffolding permit of 25 January 2021. The contract is worth 186,000 euros, of
which 62,000 euros had been paid by the end of February. The inspectors found nothing to object to and noted that the
work should end on 30 June 2021.

Hall 3 is let to the food importer Amparo and Sons at a rent of 9,400 euros a month. Its owner, Isabel Amparo, handed
over the temperature records from 1 September 2020 onwards. On 12 December 2020 and again on 2 January 2021 the cold
room was above eight degrees for more than three hours. Ms Amparo said that goods worth 5,120 euros were destroyed after
the first incident and goods worth 1,275 euros after the second, and she showed the receipts of the disposal firm,
Greenway Recycling. The inspectors asked for a second thermometer, to be installed by 31 March 2021, and set no fine.

Hall 4 holds paint and solvents. The register of dangerous goods, kept by the storekeeper Wanda Kowalczyk, was complete
and had last been updated on 2 March 2021. One of the two emergency exits was blocked by pallets, which were removed at
once. Because the same fault had been noted on 8 October 2018 by a former inspector, Pieter Janssen, the inspectors set
a fine of 1,500 euros.

Both fines are to be paid to the district office by 30 April 2021. Mr Adeyemi signed the report on the spot. A copy went
to Ms Lindqvist on 5 March 2021, and she replied on 10 March 2021 that the company accepts all findings. The next visit
is planned for the week of 6 September 2021 and will be led by Helga Brandt.
"""

_EXCAVATION = """
Annual letter of the Saltmarsh Museum Society. Dear members, the year 2018 began with a gift: on 9 January the heirs of
the painter Edith Varga left us eleven of her landscapes, insured for 74,000 pounds. Our curator, Samuel Okoro, hung
them in the east gallery, and the exhibition that he opened on 17 March was seen by 8,312 visitors before it closed on 2
September. The catalogue, written by Judith Fenwick, sold 640 copies at 15 pounds each.

In April a storm damaged the windmill. The carpenter Ivor Pritchard repaired two of its sails for 4,890 pounds, half of
which was borne by the county. The mill has been grinding again since 21 July, and our miller, Agnes Thorne, has trained
two volunteers, Noel Baptiste and Freya Lund, to run it on Sundays.

The excavation on Gull Island went into its third summer. Under the direction of Professor Miriam Katz a team of
fourteen students worked from 4 June to 27 July. On 19 June the student Daniel Osei found a bronze brooch, which the
laboratory in Leeds dates to about the year 640; on 5 July, in the same trench, came a comb of antler and a weight of
lead. The season cost 21,300 pounds. The Heatherley Trust gave 12,000 pounds of it, the university 6,500, and the
society the rest. Professor Katz will speak about the finds on 14 November in the reading room; members pay nothing,
guests 5 pounds.

Not all went well. On 30 August water from a broken pipe ran into the archive. Thanks to our archivist, Leopold Hahn,
who was working late, only three boxes became wet: the letters of Captain Reginald Moss from 1871 to 1874. The restorer
Chiara Bellini froze them on the next morning and dried them over six weeks; her bill was 2,160 pounds, and the
insurance has paid 1,900 of it. The plumber, Graham Tully, replaced the pipe on 3 September for 385 pounds.

Our membership grew from 1,204 to 1,377. The treasurer, Beatrix Nolan, reports an income of 158,420 pounds, expenses of
151,975 pounds and a reserve of 40,200 pounds. At the general meeting on 6 October Harold Quinn did not stand again as
chairman after twelve years. The members elected Yasmin Farouk in his place with 211 votes against 58 for Colin Marsh.
The subscription stays at 24 pounds, 12 pounds for students.
"""

_ORDERS = """
From: Claire Duval, purchasing. To: Arjun Mehta, accounts. Sent: 28 October 2022. Subject: open orders of the autumn.

Dear Arjun, here is the list that you asked for on Tuesday. I have gone through every order since the first of August,
and seven of them are still open.

Order 70118 was placed on 4 August 2022 with Brightwater Pumps: three circulation pumps at 1,240 euros each, 3,720 euros
in all. Two of them arrived on 29 August and were taken in by Sven Halvorsen. The third is promised for 11 November.
Please pay nothing before it is here.

Order 70125 went to Ostrava Steel on 16 August 2022 and is about forty lengths of pipe for 5,880 euros. The goods came
on 7 September, but Marta Zielinska in quality control refused nine lengths because of rust. The supplier's agent, Tomas
Dvorak, has accepted that and will send a credit note for 1,323 euros.

Order 70131, to the printer Halloway and Finch, was placed on 1 September 2022 for 2,500 safety brochures at 0.86 euros
each, 2,150 euros in all. They were delivered on 20 September to our branch in Graz by mistake. Lukas Steiner has kept
them there and will bring them along on 8 November. The invoice may be paid.

Order 70140 of 9 September 2022 is the new compressor from Kestrel Air for 28,900 euros. A third, 9,633 euros, was paid
on 14 September. The second third is due on delivery, which Ingrid Solberg of Kestrel has put off from 17 October to 5
December 2022. Our contract allows a penalty of 145 euros for each day after 31 October.

Order 70146 of 22 September 2022 is for protective clothing from Ferreira Textil, 1,964 euros. The parcel is at the
customs office, since the certificate of origin was missing. Paulo Ferreira sent it on 25 October, and I expect the
goods in the first week of November.

Order 70152, placed on 30 September 2022, concerns the service of our two cranes by Lindgren Lifting for 4,410 euros.
Their engineer, Anders Nyberg, was here on 12 and 13 October and found a worn rope on crane 2. A new rope will cost 780
euros more; Fatima Rahimi, head of the yard, approved it on 18 October.

Order 70159 of 13 October 2022 is the smallest: paper and toner from Office Lane, 312 euros. It was lost on the way, and
Rosa Delgado of Office Lane shipped it again yesterday without charge.

I am on leave from 2 to 9 November 2022, and Nadia Petrov will answer for me. Kind regards, Claire
"""

_EXTRACTION = (
    _ask(
        "extraction",
        "inspection",
        f"List every person in this report, one a line, as 'name: role or firm'. Use the report's own words.\n{_INSPECTION}",
    ),
    _ask(
        "extraction",
        "museum",
        "List every date with day and month in this letter, one a line, as 'date: what happened'. Use the letter's own "
        f"words.\n{_EXCAVATION}",
    ),
    _ask(
        "extraction",
        "orders",
        "Turn this message into a JSON list with one object for each order and the keys order, date, supplier, amount "
        f"and person, where person is someone of the supplier or of our own company. Answer with the JSON only.\n{_ORDERS}",
    ),
)

_TRANSLATION = (
    _ask(
        "translation",
        "french",
        "Translate into French: The museum is closed on Mondays. From Tuesday to Friday it opens at ten o'clock and "
        "closes at six. Children under twelve need no ticket if they come with an adult. Please leave large bags in the "
        "cloakroom next to the entrance.",
    ),
    _ask(
        "translation",
        "german",
        "Translate into German: Before you switch the machine on, check that the water tank is full and that the cup "
        "stands under the spout. Press the left button for a small cup and the right button for a large one. If the red "
        "lamp blinks, clean the filter.",
    ),
    _ask(
        "translation",
        "from-spanish",
        "Translate into English: El tren de las ocho sale hoy con veinte minutos de retraso porque hay obras en la vía. "
        "Los viajeros que van a Sevilla pueden tomar el autobús que espera delante de la estación. El billete de tren "
        "también vale para el autobús.",
    ),
)

WORKLOADS = (*_CHAT, *_CODE, *_MATHS, *_SUMMARY, *_EXTRACTION, *_TRANSLATION)


def load_dataset(path: str, limit: int | None = None) -> tuple[Workload, ...]:
    """Read a JSON Lines file in Spec-Bench's format (Xia et al., 2401.07851): ``question_id``, ``category``, ``turns``.

    Only the first turn of each question is taken.  ``limit`` keeps at most that many of each category, in the file's order;
    the whole file is checked all the same.  Blank lines are skipped.

    Raises:
        RequestError: the file cannot be read or has no questions, or a line is wrong; the message names the line.
    """
    if limit is not None and limit < 1:
        raise RequestError(f"limit must be at least 1, not {limit}; raise it or leave it out.")
    try:
        lines = Path(path).expanduser().read_bytes().split(b"\n")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such home; ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"the data set {path} cannot be read ({reason}); give a JSON Lines file.") from error
    workloads: dict[str, Workload] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            workload = _question(line)
            if workload.name in workloads:
                raise RequestError(f"question_id must be unique, but {workload.name} was there before")
        except RequestError as error:
            raise RequestError(f"{path}, line {number}: {error}; mend or remove the line.") from error
        workloads[workload.name] = workload
    if not workloads:
        raise RequestError(f"the data set {path} holds no questions; give one with at least one line.")
    kept, counts = [], Counter[str]()
    for workload in workloads.values():
        counts[workload.category] += 1
        if limit is None or counts[workload.category] <= limit:
            kept.append(workload)
    return tuple(kept)


def _question(line: bytes) -> Workload:
    """One line; raises RequestError with the rule alone, to which the caller adds the place and the next step."""
    try:
        question: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON ({error})") from error
    if not isinstance(question, dict):
        raise RequestError(f"a question must be a JSON object, not {type(question).__name__}")
    missing = [key for key in ("question_id", "category", "turns") if key not in question]
    if missing:
        raise RequestError(f"a question must have question_id, category and turns, but {missing[0]} is missing")
    question_id, category, turns = question["question_id"], question["category"], question["turns"]
    if not isinstance(question_id, (int, str)) or isinstance(question_id, bool) or question_id == "":
        raise RequestError(f"question_id must be a number or a text, not {question_id!r}")
    if not isinstance(category, str) or not category:
        raise RequestError(f"category must be a text, not {category!r}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns) or not turns[0].strip():
        raise RequestError("turns must be a list of texts, of which the first is not empty")
    return Workload(category, str(question_id), ({"role": "user", "content": turns[0]},))
