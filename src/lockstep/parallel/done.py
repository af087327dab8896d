"""What a collective gives back that was over before its call returned; for the backends that are written in Python."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import Work
from torch.futures import Future

from lockstep.parallel.untraced import untraced


@untraced
class Done(Work):
    """An operation that was over before its call returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future
