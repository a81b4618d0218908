"""What a run leaves for people: the run directory, report.html, the picture and the live progress."""

from prorsa.report.html import write_report
from prorsa.report.picture import write_picture
from prorsa.report.progress import LiveProgress
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import StepRecord, read_run, record_step

__all__ = ["LiveProgress", "RunRecorder", "StepRecord", "read_run", "record_step", "write_picture", "write_report"]
