"""A web shop: find the product that an instruction describes, choose its options, buy it.

    search page ─ search[warm red coat] ─▸ results ─ click[b7] ─▸ product ─ click[red] ─▸ … ─ click[buy now] ─▸ reward
         ▲                                    ▲ │ click[next >]      │
         └────── click[back to search] ───────┴─┴────────────────────┘

The pages, the two actions and the reward are those of WebShop (Yao et al., arXiv 2207.01206); its million products of
a real shop are replaced by a small catalogue, generated from a seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from asyncrl.config.rules import require
from asyncrl.environments.turns import action_in, answer, opening
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.tasks.generated import GeneratedRow, GeneratedRows
from asyncrl.types import Task

INSTRUCTION = """\
You shop on the web. Answer with one action at a time: <action>search[words]</action> on the search page, or
<action>click[button]</action> with a button of the page, in brackets there. Buy what fits best.
Instruction: """

KINDS = {
    "clothing": ("winter coat", "rain coat", "wool sweater", "running shirt", "leather belt"),
    "furniture": ("desk lamp", "floor lamp", "office chair", "garden chair", "coffee table"),
    "kitchen": ("coffee cup", "soup bowl", "bread knife", "frying pan", "water bottle"),
}
ATTRIBUTES = ("light", "strong", "soft", "handmade", "washable", "foldable", "classic", "modern")
OPTIONS = {"color": ("red", "blue", "green", "black", "white"), "size": ("small", "medium", "large")}
MOST_PRICE = 100

COMMAND = re.compile(r"(search|click)\[(.*)\]", re.DOTALL)
BUTTON = re.compile(r"\[([^\]]+)\]")
BUY, BACK, NEXT, PREVIOUS = "buy now", "back to search", "next >", "< prev"


@dataclass(frozen=True, slots=True)
class Product:
    """id: such as 'b7' · category: the shop's department · options: the choices of each kind · price: in dollars."""

    id: str
    name: str
    category: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: int

    @property
    def title(self) -> str:
        return " ".join([*self.attributes, self.name])


@dataclass(frozen=True, slots=True)
class Goal:
    """A product that the policy is to buy. options: one of each kind · price: the most that it may cost"""

    name: str
    category: str
    attributes: Sequence[str]
    options: Mapping[str, str]
    price: int

    def text(self) -> str:
        options = "".join(f", {kind}: {chosen}" for kind, chosen in self.options.items())
        return f"find me a {' '.join(self.attributes)} {self.name}{options}, price lower than {self.price} dollars"


@cache
def catalogue(products: int, seed: int) -> tuple[Product, ...]:
    """`products` products, the same for the same seed."""
    draw = Random(seed)
    made: list[Product] = []
    for number in range(products):
        name = draw.choice(KINDS[category := draw.choice(list(KINDS))])
        attributes = tuple(draw.sample(ATTRIBUTES, 2))
        options = {kind: tuple(draw.sample(every, len(every) - 1)) for kind, every in OPTIONS.items()}
        price = draw.randrange(5, MOST_PRICE)
        made.append(Product(f"b{number}", name, category, attributes, options, price))
    return tuple(made)


def search_results(products: Sequence[Product], query: str) -> list[Product]:
    """Products with a word of the query in their titles, those with the most words first."""
    words = set(query.lower().split())
    found = [(len(words & set(product.title.split())), product) for product in products]
    return [product for score, product in sorted(found, key=lambda pair: -pair[0]) if score]


def reward(goal: Goal, bought: Product, chosen: Mapping[str, str]) -> float:
    """WebShop's r = r_type · (attributes + options + price that are right) / (those of the goal + 1), from 0 to 1.

    r_type is 0 if the names share no word, 0.1 if they share less than a tenth, 0.5 if they share a fifth at most and
    the categories differ, else 1.
    """
    words = goal.name.split()
    shared = len(set(words) & set(bought.name.split())) / len(words)
    if shared < 0.1:
        kind = 0.1 if shared > 0 else 0.0
    else:
        kind = 1.0 if shared > 0.2 or bought.category == goal.category else 0.5
    attributes = sum(wanted in bought.attributes for wanted in goal.attributes)
    options = sum(chosen.get(name) == wanted for name, wanted in goal.options.items())
    price = bought.price <= goal.price
    return kind * (attributes + options + price) / (len(goal.attributes) + len(goal.options) + 1)


def tasks(
    products: int = 100,
    catalogue_seed: int = 0,
    page: int = 5,
    hasty: float = 0.0,
    count: int = 100_000,
    seed: int = 0,
    held_out: bool = False,
    prompt: str = INSTRUCTION,
) -> GeneratedRows:
    """Rows {prompt, goal, target}: a wish that a product of the catalogue fulfils, and the actions that buy it.

    Args:
        products: of the catalogue.
        catalogue_seed: other numbers give other catalogues.
        page: products on a page of results.
        hasty: the share of demonstrations that search for the name alone and buy the first result as it is.
        count: rows of an epoch.
        seed: other numbers give other wishes.
        held_out: wishes that no training task has.
        prompt: the text before the wish.
    """
    shop = catalogue(products, catalogue_seed)

    def row(draw: Random) -> GeneratedRow:
        product = draw.choice(shop)
        options = {kind: draw.choice(choices) for kind, choices in product.options.items()}
        limit = -(-product.price // 10) * 10 + 10 * draw.randrange(1, 3)
        goal = Goal(product.name, product.category, product.attributes, options, limit)
        if draw.random() < hasty:
            query = product.name
            clicks = [search_results(shop, query)[0].id, BUY]
        else:
            query = product.title
            place = search_results(shop, query).index(product)
            clicks = [*[NEXT] * (place // page), product.id, *options.values(), BUY]
        target = [f"search[{query}]", *(f"click[{button}]" for button in clicks)]
        wanted = {"name": goal.name, "category": goal.category, "price": limit}
        wanted |= {"attributes": list(goal.attributes), "options": options}
        return {"prompt": prompt + goal.text(), "goal": wanted, "target": target}

    return GeneratedRows(row, count, seed, held_out)


class WebShop(Environment):
    """Serves the pages, and pays the part 'bought' at the end. The state of a turn is the page.

    Args:
        products: As in `tasks`, like the next two.
        catalogue_seed: Of the catalogue.
        page: Products on a page of results.
    """

    def __init__(self, products: int = 100, catalogue_seed: int = 0, page: int = 5) -> None:
        super().__init__()
        self.check(products, catalogue_seed, page)
        self._shop, self._on_page = catalogue(products, catalogue_seed), page
        self._results: list[Product] | None = None
        self._product: Product | None = None
        self._chosen: dict[str, str] = {}

    @classmethod
    def check(cls, products: int = 100, catalogue_seed: int = 0, page: int = 5) -> None:
        require(products > 0, "products", products, "leaves the shop empty", "set products=100")
        require(page > 0, "page", page, "shows no product", "set page=5")

    async def reset(self, task: Task) -> Sequence[Message]:
        self._goal = Goal(**task.data["goal"])
        self._leave()
        return opening(task, self._page())

    async def step(self, action: Action) -> Observation:
        command = COMMAND.fullmatch(action_in(action.text).lower())
        verb, words = command.groups() if command else ("", "")
        if verb == "search" and self._results is None:
            self._results = search_results(self._shop, words)
        elif verb == "click" and words in BUTTON.findall(self._page()):
            if words == BUY:
                assert self._product is not None
                earned = {"bought": reward(self._goal, self._product, self._chosen)}
                return Observation(reward=earned, done=True)
            self._click(words)
        else:
            self.counts["malformed"] += 1
        page = self._page()
        return answer(page, state=page)

    def _leave(self) -> None:
        """Go to the search page."""
        self._results, self._product, self._first = None, None, 0
        self._chosen = {}

    def _click(self, button: str) -> None:
        if button == BACK:
            self._leave()
        elif button in (NEXT, PREVIOUS):
            self._first += self._on_page if button == NEXT else -self._on_page
        elif self._product is None:
            self._product = next(product for product in self._shop if product.id == button)
        else:
            self._chosen |= {kind: button for kind, names in self._product.options.items() if button in names}

    def _page(self) -> str:
        """The text of the page. Buttons stand in brackets."""
        if self._results is None:
            return "search page"
        if self._product is None:
            end = self._first + self._on_page
            found = [f"[{one.id}] {one.title} ${one.price}" for one in self._results[self._first : end]]
            turns = [f"[{PREVIOUS}]"] * (self._first > 0) + [f"[{NEXT}]"] * (end < len(self._results))
            return "\n".join([f"{len(self._results)} results", *found, " ".join([*turns, f"[{BACK}]"])])
        options = [
            f"{kind} {self._chosen.get(kind, '?')}: {' '.join(f'[{name}]' for name in names)}"
            for kind, names in self._product.options.items()
        ]
        return "\n".join([f"{self._product.title} ${self._product.price}", *options, f"[{BUY}] [{BACK}]"])
