"""What a run shows and writes: progress, metrics, timelines of minibatches."""

from odcengine.monitor.monitor import Monitor
from odcengine.monitor.recorder import Recorder
from odcengine.monitor.timeline import Timeline, draw_files, draw_timelines

__all__ = ["Monitor", "Recorder", "Timeline", "draw_files", "draw_timelines"]
