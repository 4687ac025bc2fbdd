from collections.abc import Callable, Sized
from threading import Lock

from sennit.collective.runtime.shm_plan import Plan

Facts = tuple[Plan, int, int, int, int, bool]

class Shortcut:
    def __new__(
        cls,
        lock: Lock,
        calls: Sized | None,
        rest: Callable[[Plan, int, object], None],
        group: int,
        start: int,
        own_first: int,
        own_last: int,
        torch: tuple[type, object, object] | None,
        /,
    ) -> Shortcut: ...
    def learn_arrays(
        self,
        facts: Facts,
        kind: str,
        array: object,
        out: object,
        dtype: object,
        reduction: object,
        root: int | None,
        /,
    ) -> None: ...
    def learn_tensors(
        self, facts: Facts, kind: str, what: int, output: object, input: object, root: int, /
    ) -> None: ...
    def arrays(
        self,
        kind: str,
        array: object,
        out: object,
        dtype: object,
        reduction: object,
        root: int | None,
        context: object,
        /,
    ) -> bool | None: ...
    def tensor(self, kind: str, what: int, tensors: object, opts: object, /) -> bool | None: ...
    def tensors(self, kind: str, what: int, output: object, input: object, opts: object, /) -> bool | None: ...
    def now(self, kind: str, what: int, output: object, input: object, root: int, /) -> bool | None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
