"""How processes start on a type of node: interpreter, container, environment."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any

from pydantic import BeforeValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sim.spec.fields import Doc

__all__ = ["RuntimeDoc", "is_secret"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SET_AT_LAUNCH = re.compile(
    r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(LOCAL|GROUP|ROLE|TORCHELASTIC|HETLAB)_.*"
)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody else's business."""
    return name.upper().endswith(("TOKEN", "KEY", "SECRET", "PASSWORD"))


def _text(value: Any) -> Any:
    """YAML reads 1 as a number; a variable's value is text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class RuntimeDoc(Doc):
    """What ranks of a node start with. Planning and simulation do not look at it.

    Args:
        python: interpreter, "" for the one that launches. container: command that runs what follows
            it inside a container, "" for none. env: variable -> value, for every rank.
        inherit: variables that ranks take from the environment of the launch, e.g. secrets, whose
            values are never written down. torch: which build is installed, for people.
    """

    python: str = ""
    container: str = ""
    env: dict[str, Annotated[str, BeforeValidator(_text)]] = {}
    inherit: tuple[str, ...] = ()
    torch: str = ""

    @field_validator("env", "inherit")
    @classmethod
    def _names(cls, names: Any) -> Any:
        for name in names:
            if not _NAME.fullmatch(name):
                raise _refused("no name of a variable: {name}", name, "letters, digits, _")
            if _SET_AT_LAUNCH.fullmatch(name):
                raise _refused("the launch sets {name} itself", name, "other variables")
        return names

    @field_validator("env")
    @classmethod
    def _plain(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            _refuse_secret(name)
            if not value.isprintable():
                raise _refused("the value of {name} is more than one line", name, "one line")
        return env

    @field_validator("python", "container", "torch")
    @classmethod
    def _one_line(cls, text: str) -> str:
        if not text.isprintable():
            raise _refused("more than one line", "", "one line")
        return text

    @field_validator("container")
    @classmethod
    def _words(cls, text: str) -> str:
        try:
            shlex.split(text)
        except ValueError as error:
            raise _refused(
                "not the words of a command: " + str(error), "", "closed quotes"
            ) from None
        return text

    @model_validator(mode="after")
    def _no_secret_word(self) -> RuntimeDoc:
        # Of the whole block, because an error about the key would repeat its text.
        for name in re.findall(r"([A-Za-z_][A-Za-z0-9_]*)=.", self.container):
            _refuse_secret(name)
        return self


def _refuse_secret(name: str) -> None:
    if is_secret(name):
        raise _refused(
            "the value of {name} does not belong in a document that plans carry", name,
            f"inherit: [{name}], and the value in the environment of the launch",
        )  # fmt: skip


def _refused(message: str, name: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("runtime", message, {"name": name, "expected": expected})
