"""Calls of programs, and their handles: the part of the asyncio client that sends nothing itself.

Written from `programs.py` by `python -m tests.support.async_client`: change that file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Unpack

from tilewire._clients import requests
from tilewire._clients.async_tensors import AsyncTensorCalls
from tilewire._clients.by_name import ByName
from tilewire._clients.requests import Rules
from tilewire._errors import BadRequest, Busy, QuotaExceeded, TilewireError
from tilewire._names import program_name
from tilewire._options import CallOptions
from tilewire._programs.program import InputSpec, Program
from tilewire._programs.trace import constants_of, name_of, record
from tilewire._types import Answer, Operand

# Answers after which a program was not kept; after others that is not known.
_REFUSALS = (BadRequest, Busy, QuotaExceeded)


class AsyncProgramCalls(AsyncTensorCalls):
    """Calls of ops, of resident tensors and of programs.

    Args:
        rules: Choices that hold for each request.

    Attributes:
        programs: The kept programs, by name.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.programs = AsyncPrograms(self)

    async def program(self, name: str, program: Program | Mapping[str, Any]) -> AsyncKeptProgram:
        """Keeps a program on the server under a name, replacing what was there, and returns its handle.

        Args:
            name: 1 to 255 of A-Z a-z 0-9 . _ -, and no op's.
            program: A `Program`, or the contract's JSON as a dict.

        Raises:
            ValueError: Not a program.
            BadRequest: A step that cannot be right; the detail has its number.
        """
        checked = program if isinstance(program, Program) else Program.from_dict(program)
        await self._do(requests.keep_program(name, checked))
        return AsyncKeptProgram(self, name, checked)

    async def run_program(
        self, program: Program | Mapping[str, Any], inputs: Mapping[str, Operand], **options: Unpack[CallOptions]
    ) -> Answer:
        """Runs a program without keeping it.

        Args:
            program: A `Program`, or the contract's JSON as a dict.
            inputs: Operands by input name.
            **options: See `CallOptions`.
        """
        checked = program if isinstance(program, Program) else Program.from_dict(program)
        return await self._do_with(
            lambda: self._rules.copied(inputs), lambda: self._rules.run_program(checked, inputs, options)
        )

    async def trace(
        self, function: Callable[..., Any], /, *, name: str | None = None, **inputs: InputSpec | tuple[Any, Any]
    ) -> AsyncKeptProgram:
        """Records NumPy-like code as a program and keeps it on the server.

        The function is called once, with stand-ins for arrays: they have `@ + - * /`, the methods of `Traced`, and go
        through NumPy's functions. Arrays that the code refers to are uploaded with the elements that they have then, in
        the dtype of the value beside them. Their names have a digest of the elements, as `name/c0-9f86d081884c7d65`: a
        program of that name that is replaced has its constants until then, and they are removed afterwards.

        Args:
            function: Called with each input by name; returns one traced value, a tuple, or a dict that names them. One is
                called `out`, those of `topk` and `search` are `values` and `indices`.
            name: Name of the program; the function's by default.
            **inputs: Dtype and shape of each argument, as `("float32", (-1, 768))`; -1 for any size.

        Raises:
            TypeError: The code does something that no op computes, has no name, or takes an argument by position alone.
            ValueError: More than 32 steps, or a name of a result that an input has.
            BadRequest: The program cannot be right; the detail has the step's number. What was kept before stays.
        """
        name = program_name(name_of(function) if name is None else name)
        recorded = record(function, inputs, name)
        before = await self._constants_of(name)
        new: list[str] = []
        try:
            for constant, array in recorded.constants.items():
                if await self.head(constant) is None:
                    new.append(constant)
                    await self.put(constant, array)
        except TilewireError:
            await self._discard(new)
            raise
        try:
            kept = await self.program(name, recorded.program)
        except _REFUSALS:
            await self._discard(new)
            raise
        await self._discard(sorted(before - recorded.constants.keys()))
        return kept

    async def _constants_of(self, name: str) -> set[str]:
        """Names of the constants of a kept program; none where there is no program to be read."""
        try:
            return constants_of(await self._do(requests.program(name)), name)
        except BadRequest:
            return set()

    async def _discard(self, names: Iterable[str]) -> None:
        """Removes constants that no program has; one that stays costs room, and nothing else."""
        for name in names:
            with suppress(TilewireError):
                await self.delete(name)


class AsyncKeptProgram:
    """A handle of a program on the server; calling it runs it.

    Attributes:
        name: Name of the program.
    """

    def __init__(self, client: AsyncProgramCalls, name: str, program: Program | None = None) -> None:
        self._client = client
        self.name = name
        self._program = program

    async def __call__(self, **inputs: Operand) -> Any:
        """Runs the program. Lists and numbers take the dtypes that it declares, which are fetched first where need be.

        Args:
            **inputs: Operands by input name.

        Returns:
            The output, or the outputs by name where there are several (`TopK` for values and indices).
        """
        return (await self.run(inputs)).result

    async def run(self, inputs: Mapping[str, Operand], **options: Unpack[CallOptions]) -> Answer:
        """Runs the program and returns, besides the outputs, timings and the size of the batch.

        Args:
            inputs: Operands by input name.
            **options: See `CallOptions`.
        """
        rules = self._client._rules
        if self._program is None and rules.needs_declaration(inputs):
            await self.describe()
        program = self._program
        return await self._client._do_with(
            lambda: rules.copied(inputs), lambda: rules.run_program(self.name, inputs, options, program)
        )

    async def describe(self) -> Program:
        """Fetches the program, which the handle then keeps.

        Raises:
            NotFound: No program of that name.
        """
        self._program = await self._client._do(requests.program(self.name))
        return self._program

    async def delete(self) -> None:
        """Removes the program from the server, and the constants that `trace` uploaded for it.

        Raises:
            NotFound: No program of that name.
        """
        constants = await self._client._constants_of(self.name)
        await self._client._do(requests.delete_program(self.name))
        await self._client._discard(sorted(constants))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class AsyncPrograms(ByName):
    """The programs that a server keeps, by name. Calling it lists them."""

    def __init__(self, client: AsyncProgramCalls) -> None:
        self._client = client

    def __getitem__(self, name: str) -> AsyncKeptProgram:
        return AsyncKeptProgram(self._client, program_name(name))

    async def __call__(self) -> list[AsyncKeptProgram]:
        """Lists the programs."""
        names = await self._client._do(requests.programs())
        return [AsyncKeptProgram(self._client, name) for name in names]

    def __repr__(self) -> str:
        return f"<programs of {self._client!r}>"
