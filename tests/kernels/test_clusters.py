"""What programs of a cluster do for each other, in the text of a program. `test_compile` has what the compilers write."""

import pytest

from tilewire.kernels.matmul.configs import Config, Problem
from tilewire.kernels.matmul.hopper.clusters import join
from tilewire.kernels.matmul.hopper.stages import CHANGES, digest_of
from tilewire.kernels.matmul.members import specialization_of
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.runtime.targets import KNOWN

LOAD = "\t@%p6 cp.async.bulk.tensor.2d.shared::{space}.global.mbarrier::complete_tx::bytes [%r1], [%rd5, {{%r2, %r3}}], [%r4];"
ARRIVE = "\t@%p7 mbarrier.arrive.shared::cta.b64 _, [%r9];"
BOTH = "\t// cluster arrive %r8 %r91"
SEND = (
    "\t// cluster send {program} 4096 %r93",
    "\tbar.sync \t0, 128;",
    "\t@%p8 mbarrier.arrive.shared::cta.b64 _, [%r20];",
    "\tbar.sync \t0, 128;",
    "\t@%p8 mbarrier.arrive.shared::cta.b64 _, [%r21];",
)
TELL = ("\t// cluster tell {program} %r94", "\t@%p9 mbarrier.arrive.shared::cta.b64 _, [%r22];")


def program(*lines, size="2 1"):
    return "\n".join(
        (
            ".visible .entry kernel()",
            ".reqntid 256",
            "{",
            "\t@%p1 bra \t$L__BB0_2;",
            "\tbra.uni \t$L__BB0_1;",
            "$L__BB0_2:",
            f"\t// cluster begin {size} %r90",
            *lines,
            "\tbra.uni \t$L__BB0_3;",
            "\tret;",
            "}",
        )
    )


def sharing(*lines, size="2 1"):
    return program("\t// cluster all %r91", *lines, "\t// cluster one %r92", BOTH, ARRIVE, size=size)


def sending(*lines, owner=0, size="1 2"):
    return program(*(line.format(program=owner) for line in lines), size=size)


@pytest.mark.parametrize("space", ["cta", "cluster"])
@pytest.mark.parametrize(("size", "every"), [(2, 3), (4, 15)])
def test_loads_between_the_marks_are_for_all_and_others_are_not(space, size, every):
    own = LOAD.format(space=space)
    given = program(own, "\t// cluster all %r91", own, "\t// cluster one %r92", own, BOTH, ARRIVE, size=f"{size} 1")
    found = join(given).split("\n")
    loads = [line for line in found if "bulk.tensor" in line]
    shared = LOAD.format(space="cluster").replace("bytes [", "bytes.multicast::cluster [").replace("];", "], all;")
    assert loads == [own, shared, own]
    assert found[found.index(shared) - 1] == f"\tmov.b16 all, {every};"


def test_the_loader_is_told_and_programs_wait_for_each_other_at_the_start():
    found = join(sharing(LOAD.format(space="cta"), size="4 1"))
    assert ".reqntid 256\n.reqnctapercluster 4, 1, 1\n" in found
    assert "\tbarrier.cluster.arrive.relaxed;\n\tbra.uni \t$L__BB0_1;" in found
    # Only the first jump is that of the warps that wait for work.
    assert "$L__BB0_3" in found
    assert found.count("barrier.cluster.arrive") == 2
    assert found.count("barrier.cluster.wait.acquire") == 1
    # In its own program, and in that of the register, unless it is negative.
    assert (
        f"{ARRIVE}\n\t{{\n\t.reg .b32 there;\n\t.reg .pred is_there;\n\tsetp.ge.s32 is_there, %r8, 0;\n"
        "\tand.pred is_there, is_there, %p7;\n\tmapa.shared::cluster.u32 there, %r9, %r8;\n"
        "\t@is_there mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}\n"
    ) in found


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("", []),
        ("@!%p7 ", ["\t.reg .pred is_given;", "\tnot.pred is_given, %p7;", "\tand.pred is_there, is_there, is_given;"]),
    ],
)
def test_an_arrival_at_both_keeps_its_condition(given, lines):
    arrive = ARRIVE.replace("@%p7 ", given)
    found = join(sharing(LOAD.format(space="cta")).replace(ARRIVE, arrive)).split("\n")
    first = found.index("\tsetp.ge.s32 is_there, %r8, 0;")
    assert found[first + 1 : first + 1 + len(lines)] == lines
    assert found[first + 1 + len(lines)].startswith("\tmapa")


@pytest.mark.parametrize("owner", [0, 1])
def test_sums_are_copied_to_the_program_that_owns_them_once_it_is_there(owner):
    found = join(sending(ARRIVE, *SEND, ARRIVE, *TELL, ARRIVE, owner=owner, size="1 3"))
    assert ".reqntid 256\n.reqnctapercluster 1, 3, 1\n" in found
    assert found.count("barrier.cluster.arrive") == 2
    # Not at the start, where its own barriers are ready.
    begun, _, sent = found.partition("\tbarrier.cluster.wait.acquire;\n")
    assert "\tfence.mbarrier_init.release.cluster;\n\tbarrier.cluster.arrive.release;\n" in begun
    assert sent.startswith(
        "\t{\n\t.reg .b32 there, bar;\n"
        f"\tmapa.shared::cluster.u32 there, %r20, {owner};\n"
        f"\tmapa.shared::cluster.u32 bar, %r21, {owner};\n"
        "\t@%p8 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%r20], 4096, [bar];\n\t}\n"
    )
    # What says where place and barrier are is no arrival, and those before and behind are the program's own.
    assert "_, [%r20]" not in found
    assert "_, [%r21]" not in found
    assert found.count(ARRIVE) == 3


@pytest.mark.parametrize(("owner", "others"), [(0, (1, 2)), (1, (0, 2))])
def test_the_program_that_owns_sums_tells_all_others(owner, others):
    found = join(sending(*SEND, *TELL, owner=owner, size="1 3"))
    told = "\tmapa.shared::cluster.u32 there, %r22, {};\n\t@%p9 mbarrier.arrive.shared::cluster.b64 _, [there];\n"
    assert "".join(map(told.format, others)) in found
    assert f"%r22, {owner};" not in found
    assert "_, [%r22]" not in found


def test_other_programs_stay_as_they_are():
    given = program(LOAD.format(space="cta"), ARRIVE).replace("// cluster begin", "// columns 8")
    assert join(given) == given


@pytest.mark.parametrize(
    "lost", [".reqntid 256\n", "\t@%p1 bra \t$L__BB0_2;\n", ARRIVE, BOTH, LOAD.format(space="cta")]
)
def test_a_text_that_loads_for_all_and_lacks_what_is_to_be_changed_is_refused(lost):
    given = sharing(LOAD.format(space="cta"))
    assert lost in given
    with pytest.raises(RuntimeError, match="clusters are not known"):
        join(given.replace(lost, ""))


@pytest.mark.parametrize("lost", [".reqntid 256\n", "\t@%p1 bra \t$L__BB0_2;\n", SEND[2], SEND[4], TELL[1]])
def test_a_text_that_sends_and_lacks_what_is_to_be_changed_is_refused(lost):
    given = sending(*SEND, "\t// cluster own %r95", *TELL)
    assert lost in given
    with pytest.raises(RuntimeError, match="clusters are not known"):
        join(given.replace(lost, ""))


def test_a_text_that_loads_for_all_and_of_which_some_would_stay_as_it_is_is_refused():
    load = LOAD.format(space="cta")
    given = sharing(load).replace(ARRIVE, f"{ARRIVE}\n{BOTH}\n{ARRIVE}")
    expects = "\t@%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 20480;"
    assert expects in join(given.replace(load, f"{load}\n{expects}"))
    other_load = "\tcp.async.bulk.tensor.next [%r1], [%rd5], [%r4];"
    for changed in (
        given.replace(ARRIVE, ARRIVE.replace("_, [%r9]", "%rd9, [%r9], 1"), 1),
        given.replace(f"\n{ARRIVE}", "", 1),
        given.replace(load, f"{load}\n{other_load}"),
    ):
        assert changed != given
        with pytest.raises(RuntimeError, match="clusters are not known"):
            join(changed)


@pytest.mark.parametrize("number", [2, 4])
def test_a_text_that_sends_and_of_which_some_would_stay_as_it_is_is_refused(number):
    other = SEND[number].replace("_, [", "%rd9, [")
    with pytest.raises(RuntimeError, match="clusters are not known"):
        join(sending(*SEND[:number], other, *SEND[number + 1 :], *TELL))


def test_what_was_compiled_before_a_change_of_the_text_is_not_taken(tmp_path):
    names = ("one.py", "two.py")
    for name in names:
        (tmp_path / name).write_text(f"# {name}")
    before = digest_of(tmp_path, names)
    assert digest_of(tmp_path, names) == before
    (tmp_path / "two.py").write_text("# another")
    assert digest_of(tmp_path, names) != before
    config = Config("wgmma", 64, 64, 64, num_stages=8, is_persistent=True)
    problem = Problem(64, 512, 512, 1, "bfloat16", "bfloat16")
    target = KNOWN["nvidia_h200"]
    variant = build(specialization_of(problem, config, is_plain=True), config, target)
    # A constant of the binary, as which Triton's cache has it in its key.
    assert dict(variant.constants)["FORM"].changes == CHANGES
