from plaingpt.monitoring.run_summary import write as write_report  # noqa: F401
