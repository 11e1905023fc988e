"""What is said of a part and of each of its arguments, read from where the part is written.

In this order: the string under the field of a dataclass, its own or a base's; a line `name: words` in the last block of
a docstring; for a function, the string under the field of the same name and default in what it makes; for arguments
that mean the same in every part, SHARED.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Any, get_type_hints

from torch import nn

SHARED = {
    "norm": "how activations are normalised, and who owns the statistics",
    "objective": "what a client minimises",
    "optimiser": "how clients step",
    "aggregator": "how the server combines the replies",
    "attack": "how training images are attacked",
    "inner": "the objective it is added to",
    "branch": "whose statistics the attacked images are normalised with",
    "epsilon": "radius of the attack, in pixels of [0, 1]",
    "ball": "the norm that the radius is of",
    "steps": "steps of the attack",
    "step": "length of a step",
    "start": "where the attack begins: uniform in the ball, normal (0.001 N(0, 1)) around the image, or at it",
    "restarts": "starts of the attack; the strongest result counts",
    "keep_best": "the best point met instead of the last",
    "loss": "what the attack climbs",
    "targets": "wrong classes to aim at, the likeliest first",
    "width": "share of the channels; 1 is the whole network",
    "scale": "mean and deviation that pixels are normalised with inside the network; absent: pixels in [0, 1]",
    "weigh": "updates count by their examples, or each the same",
    "classes": "classes of the data",
    "shape": "channels, height and width of an image",
}
"""arguments that mean the same in every part"""
GIVEN = {"model": frozenset({"norm", "classes", "shape"})}
"""kind of part -> arguments that an experiment does not set: they come from the method and the data"""
_LINE = re.compile(r"(\w+): (.+)")


def description(factory: Callable[..., Any]) -> str:
    """The docstring, a line for each paragraph, without the lines on arguments."""
    return "\n\n".join(" ".join(block.split()) for block in _blocks(factory) if not _lines(factory, block))


def argument_docs(factory: Callable[..., Any]) -> dict[str, str]:
    """Argument -> one sentence; an argument that nothing is said of is left out."""
    own = _made_docs(factory) | _line_docs(factory)
    if isinstance(factory, type):
        own |= _class_docs(factory)
    names = inspect.signature(factory).parameters
    return {name: words for name in names if (words := own.get(name) or SHARED.get(name))}


def _blocks(factory: Callable[..., Any]) -> list[str]:
    return re.split(r"\n\s*\n", inspect.cleandoc(factory.__doc__ or ""))


def _lines(factory: Callable[..., Any], block: str) -> list[tuple[str, str]]:
    """(argument, words) of a block that holds nothing else; a line that goes on is indented."""
    joined = re.sub(r"\n\s+", " ", block)
    found = [_LINE.fullmatch(line) for line in joined.splitlines()]
    lines = [(match[1], match[2]) for match in found if match]
    arguments = inspect.signature(factory).parameters
    return lines if len(lines) == len(found) and all(name in arguments for name, _ in lines) else []


def _line_docs(factory: Callable[..., Any]) -> dict[str, str]:
    return {name: words for block in _blocks(factory) for name, words in _lines(factory, block)}


def _made_docs(factory: Callable[..., Any]) -> dict[str, str]:
    """Docs of a function's arguments, from the fields they end up in."""
    if isinstance(factory, type):
        return {}
    made = get_type_hints(factory).get("return")
    if isinstance(made, type) and issubclass(made, nn.Module):
        return {}  # a network is no dataclass, and takes long to make
    arguments = inspect.signature(factory).parameters
    if not arguments or any(argument.default is argument.empty for argument in arguments.values()):
        return _class_docs(made) if isinstance(made, type) else {}
    found: dict[str, set[str]] = {name: set() for name in arguments}
    for inner in _tree(factory()):
        for name, words in _class_docs(type(inner)).items():
            if name in found and getattr(inner, name) == arguments[name].default:
                found[name].add(words)
    return {name: min(words) for name, words in found.items() if len(words) == 1}


def _tree(value: Any) -> Iterator[Any]:
    """A part and those inside it."""
    if is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _tree(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tree(each)


def _class_docs(made: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(made.__mro__):
        if is_dataclass(base):
            docs |= field_docs(base)
    return docs


@cache
def field_docs(table: type) -> dict[str, str]:
    """Field of a dataclass -> the string literal under it."""
    try:
        source = ast.parse(dedent(inspect.getsource(table))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}  # written in a session, not in a file
    assert isinstance(source, ast.ClassDef)
    docs = {}
    for field, below in pairwise(source.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                docs[name] = " ".join(words.split())
    return docs
