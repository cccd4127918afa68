"""Tests of a program, in a cell of their own: they call it, and they decide.

A program and its tests share no interpreter, so nothing that a program does to its own (to `assert`, to `==`, to the
tests' frames, to how it ends) can make them pass: its only way to them is plain values (`async_rl.sandbox.values`).
The tests come from somebody, too, so they run behind walls as well.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

from async_rl.sandbox.channel import Channel
from async_rl.sandbox.values import decode, encode

CHANNEL, VERDICT = 3, 4  # its files: to the program, and to whoever wants to know
MOST_NOTE = 300  # characters
CLAIMS = ("syntax", "undefined", "result", "exit", "memory", "forbidden", "processes", "disk", "files")


class Gone(BaseException):
    """The program does not answer any more, or not as a program does. Tests that catch it (a bare `except`) change
    nothing: it is a failure all the same."""


class Judge:
    """Runs tests against the program behind a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.passed = 0
        self.failed = 0
        self.gone = False
        self.why = ""  # of what failed first
        self.note = ""

    def await_program(self) -> None:
        """Raises Gone unless it could be defined."""
        ready = self._receive()
        if "ready" not in ready:
            self._end(ready)

    def function(self, name: str) -> Callable[..., Any]:
        """The program's function of this name, as tests may call it."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        called.__name__ = called.__qualname__ = name
        return called

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with contextlib.suppress(OSError):  # it has ended: what it said before says more
            self._channel.send({"call": name, "args": encode(args), "kwargs": encode(kwargs)})
        reply = self._receive()
        if "raise" in reply:
            kind = getattr(builtins, str(reply["raise"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                self._end(reply)  # SystemExit and the like: a program that wants to end has ended
            raise rebuilt(kind, str(reply.get("text", "")), why_of(reply))
        try:
            value = decode(reply["value"])
            if reply.get("args") is not None:
                for ours, theirs in zip(args, decode(reply["args"]), strict=True):
                    take_over(ours, theirs)
            return value
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            self._refuse(str(error))

    def _end(self, reply: dict[str, Any]) -> NoReturn:
        """Of what the program could not go on."""
        if "raise" not in reply:
            self._refuse("neither ready nor an exception")
        self.why = self.why or why_of(reply)
        self.note = self.note or f"{reply['raise']}: {reply.get('text')}"[:MOST_NOTE]
        self._give_up()

    def _receive(self) -> dict[str, Any]:
        try:
            reply = self._channel.receive()
        except EOFError:
            self.why = self.why or "gone"
            self._give_up()
        except ValueError as error:
            self._refuse(str(error))
        if not isinstance(reply, dict):
            self._refuse("no answer")
        return reply

    def _refuse(self, note: str) -> NoReturn:
        self.why, self.note = self.why or "result", self.note or f"not what a program answers: {note}"
        self._give_up()

    def _give_up(self) -> NoReturn:
        self.gone = True
        raise Gone from None

    def __enter__(self) -> None:
        """Around each assertion of the tests."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        """Count it, and go on after one that fails."""
        if error is None:
            self.passed += 1
        elif isinstance(error, Exception):
            self.fail(error)
        return isinstance(error, Exception)

    def fail(self, error: BaseException) -> None:
        self.failed += 1
        if not self.why:
            self.why = "wrong" if isinstance(error, AssertionError) else getattr(error, "why", "error")
            self.note = f"{type(error).__name__}: {error}"[:MOST_NOTE]


def why_of(reply: dict[str, Any]) -> str:
    """A program says itself why it failed, but in no words of its own."""
    return reply["why"] if reply.get("why") in CLAIMS else "error"


def rebuilt(kind: type[Exception], text: str, why: str) -> Exception:
    try:
        error = kind(text)
    except TypeError:  # UnicodeDecodeError, for one, is made of more than a text
        error = ValueError(text)
    error.why = why  # type: ignore[attr-defined]
    return error


def take_over(ours: Any, theirs: Any) -> None:
    """A list, dict or set that was handed over is what the program made of it."""
    if isinstance(ours, list) and isinstance(theirs, list):
        ours[:] = theirs
    elif isinstance(ours, dict | set) and type(theirs) is type(ours):
        ours.clear()
        ours.update(theirs)


class CountAssertions(ast.NodeTransformer):
    """Each `assert` with a `with` around it. `found` says whether there is any, or a `raise`: tests have to be able to
    fail."""

    found = False

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.found = True
        around = ast.With([ast.withitem(ast.Name("__counted__", ast.Load()))], [node])
        return ast.copy_location(around, node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        self.found = True
        return node


def unknown_names(tree: ast.AST, known: set[str]) -> set[str]:
    """What tests ask for and do not make: the program's."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    made |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {(each.asname or each.name).split(".")[0] for node in ast.walk(tree)
             if isinstance(node, ast.Import | ast.ImportFrom) for each in node.names}  # fmt: skip
    return {node.id for node in names} - made - known - set(dir(builtins))


def judge(given: dict[str, Any]) -> int:
    """Run the tests, and say what came of them: a verdict on file 4. `broken` is about the tests themselves."""
    verdict, case = Channel(VERDICT), Judge(Channel(CHANNEL))
    broken = ""
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        count = CountAssertions()
        tests = ast.fix_missing_locations(count.visit(ast.parse(given["tests"])))
        code = compile(tests, "<tests>", "exec")
        if not count.found:
            raise ValueError("nothing is asserted")
        exec(compile(given["setup"], "<setup>", "exec"), space)
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"[:MOST_NOTE]
    else:
        hold(case, given["entry_point"], tests, code, space)
    verdict.send({"passed": case.passed, "failed": case.failed, "why": case.why, "note": case.note, "broken": broken})
    return 0


def hold(case: Judge, entry: str, tests: ast.AST, code: CodeType, space: dict[str, Any]) -> None:
    """Whatever the tests do, `case` knows what came of it."""
    names = unknown_names(tests, {*space, "__counted__"}) | ({entry} if entry else set())
    space.update({name: case.function(name) for name in names}, __counted__=case)
    try:
        case.await_program()
        exec(code, space)
        if entry and callable(space.get("check")):
            space["check"](space[entry])
    except Gone:
        pass
    except BaseException as error:  # raised by tests that took an answer for granted
        case.fail(error)
    case.failed += case.gone
