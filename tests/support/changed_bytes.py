"""Changes bytes of a body at random."""

from __future__ import annotations

from hypothesis import strategies as st


def changed_bytes(data: st.DataObject, body: bytes) -> bytes:
    """Returns a body of which up to four places are overwritten, cut or have bytes inserted."""
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                changed[at] = data.draw(st.integers(0, 255))
            case "cut":
                del changed[at : at + data.draw(st.integers(1, 20))]
                changed = changed or bytearray(b"\0")
            case _:
                changed[at:at] = data.draw(st.binary(max_size=20))
    return bytes(changed)
