from plaingpt.monitoring.metrics import finite, read_rows  # noqa: F401
from plaingpt.monitoring.metrics import trim as trim_rows  # noqa: F401
