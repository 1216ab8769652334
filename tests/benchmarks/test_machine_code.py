"""Instructions that are counted in machine code."""

import pytest

MACHINE_CODE = """
        /*0000*/                   S2R R0, SR_CTAID.X ;                 /* 0x0 */
        /*0010*/                   IADD3 R1, R0, 0x1, RZ ;              /* 0x0 */
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;     /* 0x0 */
{body}        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ ; /* 0x0 */
        /*0110*/               @P1 BRA 0x10 ;                          /* 0x0 */
        /*0120*/                   EXIT ;                              /* 0x0 */
        /*0130*/                   BRA 0x130;                          /* 0x0 */
        /*0140*/                   NOP;                                /* 0x0 */
""".format(
    body="".join(
        f"        /*00{place:x}0*/                   FMNMX R{place}, R8, R9, !PT ;\n" for place in range(3, 16)
    )
)


@pytest.mark.parametrize("trips, times", [((), 1), ((5,), 5), ((5, 7), 5)], ids=str)
def test_instructions_of_loops_count_as_often_as_they_run(trips, times):
    machine_code = pytest.importorskip("benchmarks.kernels.compilation", exc_type=ImportError)
    found = machine_code.counted_text(MACHINE_CODE, trips)
    assert found == machine_code.Instructions(3 + 17 * times, 14 * times, times, times, 1)
    # 132 multiprocessors with four schedulers, which compare for half as many threads as they have, at 1.755 GHz.
    assert machine_code.least_microseconds(found, 1000) == pytest.approx(1e3 * 28 * times / (132 * 4 * 1755), rel=1e-6)
