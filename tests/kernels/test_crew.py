"""Workers: results in time, and one item's crash, exception or hang is no other's."""

import pytest

from tilewire.kernels.autotune.crew import Crew, Failure


@pytest.mark.slow
def test_a_crash_an_exception_and_a_hang_discard_only_their_item():
    items = ["1+1", "1/0", "__import__('os')._exit(7)", "2+2", "__import__('time').sleep(600)", "3+3"]
    found: dict[int, object] = {}
    again: dict[int, object] = {}
    with Crew(eval, num_workers=1, timeout_s=2.0) as crew:
        crew.run(items, found.__setitem__, lambda: False)
        crew.run(["6*7"], again.__setitem__, lambda: False)
    assert found == {
        0: 2,
        1: Failure("ZeroDivisionError: division by zero"),
        2: Failure("the process ended with status 7"),
        3: 4,
        4: Failure("took longer than 2 s"),
        5: 6,
    }
    assert again == {0: 42}


def test_nothing_is_begun_once_it_is_over():
    found: dict[int, object] = {}
    with Crew(eval, num_workers=1) as crew:
        crew.run(["1", "2"], found.__setitem__, lambda: True)
    assert found == {}
