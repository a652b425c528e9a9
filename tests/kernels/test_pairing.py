"""Loads for pairs of programs, in the text of a program. `test_compile` has what the compilers write."""

import pytest

from tilewire.kernels.matmul.hopper.pairing import pair

LOAD = "\t@%p6 cp.async.bulk.tensor.2d.shared::{space}.global.mbarrier::complete_tx::bytes [%r1], [%rd5, {{%r2, %r3}}], [%r4];"
ARRIVE = "\t@%p7 mbarrier.arrive.shared::cta.b64 _, [%r9];"


def program(*lines):
    return "\n".join(
        (
            ".visible .entry kernel()",
            ".reqntid 256",
            "{",
            "\t@%p1 bra \t$L__BB0_2;",
            "\tbra.uni \t$L__BB0_1;",
            "$L__BB0_2:",
            "\t// pair begin %r90",
            *lines,
            "\tbra.uni \t$L__BB0_3;",
            "\tret;",
            "}",
        )
    )


@pytest.mark.parametrize("space", ["cta", "cluster"])
def test_loads_between_the_marks_are_for_both_and_others_are_not(space):
    own = LOAD.format(space=space)
    found = pair(program(own, "\t// pair both %r91", own, "\t// pair one %r92", own, ARRIVE)).split("\n")
    loads = [line for line in found if "bulk.tensor" in line]
    both = LOAD.format(space="cluster").replace("bytes [", "bytes.multicast::cluster [").replace("];", "], both;")
    assert loads == [own, both, own]
    assert found[found.index(both) - 1] == "\tmov.b16 both, 3;"


def test_both_programs_are_told_and_wait_for_each_other_at_the_start():
    given = program("\t// pair both %r91", LOAD.format(space="cta"), "\t// pair one %r92", ARRIVE)
    found = pair(given)
    assert ".reqntid 256\n.reqnctapercluster 2, 1, 1\n" in found
    assert "\tbarrier.cluster.arrive.relaxed;\n\tbra.uni \t$L__BB0_1;" in found
    # Only the first jump is that of the warps that wait for work.
    assert "$L__BB0_3" in found
    assert found.count("barrier.cluster.arrive") == 2
    assert found.count("barrier.cluster.wait.acquire") == 1
    told = "\tmapa.shared::cluster.u32 there, %r9, {};\n\t@%p7 mbarrier.arrive.shared::cluster.b64 _, [there];\n"
    assert told.format(0) + told.format(1) in found
    assert "_, [%r9]" not in found


def test_other_programs_stay_as_they_are():
    given = program(LOAD.format(space="cta"), ARRIVE).replace("// pair begin", "// columns 8")
    assert pair(given) == given


@pytest.mark.parametrize(
    "lost", [".reqntid 256\n", "\t@%p1 bra \t$L__BB0_2;\n", "\t// pair begin %r90\n", ARRIVE, LOAD.format(space="cta")]
)
def test_a_text_that_lacks_what_is_to_be_changed_is_refused(lost):
    given = program("\t// pair both %r91", LOAD.format(space="cta"), "\t// pair one %r92", ARRIVE)
    assert lost in given
    with pytest.raises(RuntimeError, match="pairs of them are not known"):
        pair(given.replace(lost, ""))


@pytest.mark.parametrize(
    "other", [ARRIVE.replace("_, [%r9]", "%rd9, [%r9], 1"), "\tcp.async.bulk.tensor.next [%r1], [%rd5], [%r4];"]
)
def test_a_text_of_which_some_would_stay_as_it_is_is_refused(other):
    load = LOAD.format(space="cta")
    given = program("\t// pair both %r91", load, "\t// pair one %r92", ARRIVE)
    expects = "\t@%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 20480;"
    assert expects in pair(given.replace(load, f"{load}\n{expects}"))
    with pytest.raises(RuntimeError, match="pairs of them are not known"):
        pair(given.replace(load, f"{load}\n{other}"))
