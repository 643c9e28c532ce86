"""Ways to record one step and run it again without arguments."""

from nanoserve_lab.recorders.arena import Arena
from nanoserve_lab.recorders.eager import eager_recorder
from nanoserve_lab.recorders.recording import Recorder, Recording, RecordingRefused
from nanoserve_lab.recorders.tape import tape_recorder

__all__ = ["Arena", "Recorder", "Recording", "RecordingRefused", "eager_recorder", "tape_recorder"]
