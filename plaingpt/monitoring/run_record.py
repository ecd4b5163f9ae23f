from plaingpt.monitoring import run_summary
from plaingpt.monitoring.run_summary import read_run, write_run  # noqa: F401
from plaingpt.system.devices import device_name


def describe_run(config, dataset, stream, model, device, dtype, compile, world, resumed):
    return run_summary.describe(config, dataset, stream, model, device_name(device), dtype, compile,
                                world, resumed)
