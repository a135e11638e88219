"""Figures of runs for other programs: Prometheus, OpenTelemetry, Perfetto, Grafana. All of them read run directories only."""
