from plaingpt.system.hardware import mfu, peak_flops


def test_utilisation_is_known_only_where_the_peak_is():
    assert mfu(1e12, 'cpu', 'bfloat16') is None
    assert mfu(1e12, 'NVIDIA A100-SXM4-80GB', 'float32') is None
    assert mfu(156e12, 'NVIDIA A100-SXM4-80GB', 'bfloat16') == 0.5
    assert peak_flops('NVIDIA L40S', 'bfloat16') == 362e12  # and not the L4's
