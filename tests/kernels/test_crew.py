"""Workers: results in time, and one item's crash, exception or hang is no other's."""

import itertools

from kernels.tuning.crew import Crew, Failure


def results(items, *, timeout_s=60.0, num_workers=2, is_over=lambda: False):
    found: dict[int, object] = {}
    with Crew(eval, num_workers=num_workers, timeout_s=timeout_s) as crew:
        crew.run(items, found.__setitem__, is_over)
        again: dict[int, object] = {}
        crew.run(["6*7"], again.__setitem__, lambda: False)
    assert again == {0: 42}
    return found


def test_a_crash_and_an_exception_discard_only_their_item():
    found = results(["1+1", "__import__('os')._exit(7)", "1/0", "2+2", "__import__('os').abort()", "3+3"])
    assert (found[0], found[3], found[5]) == (2, 4, 6)
    assert found[1] == Failure("the process ended with status 7")
    assert found[2] == Failure("ZeroDivisionError: division by zero")
    assert found[4] == Failure("the process ended with status -6")


def test_what_hangs_is_ended():
    found = results(["__import__('time').sleep(600)", "5"], timeout_s=3.0)
    assert found == {0: Failure("took longer than 3 s"), 1: 5}


def test_nothing_is_begun_once_it_is_over():
    asked = itertools.count()
    assert len(results([str(number) for number in range(50)], is_over=lambda: next(asked) > 0)) < 50
