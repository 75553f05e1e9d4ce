"""A recording: what a training step was seen to do, with the plan that it ran by. It is written to JSON and read back."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from typing_extensions import override

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.replay import prediction_of
from lightning_harmony.plan.values.document import Document, DocumentKind
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import Prediction
from lightning_harmony.plan.values.task import STREAM_OF, Phase


@dataclass(frozen=True)
class Recording(Document):
    """A step that was recorded.

    Attributes:
        plan: what it ran by; its packs include the parameters that the code between the layers used.
        measured: what it did, told as a prediction tells it.
        update: when parameters were updated, and why. What was deferred ran in the step that followed, or after this one.
    """

    # A reader of one version refuses all others: a step is quickly recorded anew.
    kind = DocumentKind(
        "lightning-harmony recording",
        3,
        "recorded step",
        "recording",
        origin=". HarmonyMonitor(trace_step=...) writes one",
        way_out=": record anew",
    )

    plan: Plan
    measured: Prediction
    update: str

    def predicted(self) -> Prediction | None:
        """What the plan says that the step does; None if it does not say, or microbatches took no turns as it has it."""
        predicted = prediction_of(self.plan)
        is_other = predicted is not None and _takes_turns(predicted) and not _takes_turns(self.measured)
        return None if is_other else predicted

    def why_unpredicted(self) -> str:
        """Why nothing is predicted of the step."""
        if self.plan.profile is None:
            return "the plan was made before the step had been measured"
        if not _takes_turns(self.measured):
            return "microbatches ran one after the other"
        return "the plan is so tight that a step makes room as it goes"

    @override
    def refuse_contradictions(self) -> None:
        """Refuse devices and packs that the plan has not, and spans that no step has."""
        plan, devices = self.plan, self.measured.devices
        if len(devices) != plan.num_devices:
            raise PlanError(f"the recording is of {len(devices)} devices, its plan for {plan.num_devices}")
        for number, device in enumerate(devices):
            for span in device.spans:
                if span.task.pack >= len(plan.packs):
                    raise PlanError(f"{span.task} on device {number}: there is no pack {span.task.pack}")
                if STREAM_OF.get(span.task.kind) != span.stream:
                    raise PlanError(f"{span.task} on device {number} is on stream {span.stream!r}, where it never runs")
                if span.start_seconds > span.end_seconds:
                    raise PlanError(
                        f"{span.task} on device {number} runs from {span.start_seconds} s to {span.end_seconds} s"
                    )


def read_recording(file: Path) -> Recording:
    """The recording that a file holds.

    Raises:
        PlanError: if there is no such file, or it holds something else.
    """
    try:
        return Recording.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"{str(file)!r}: {error}") from error


def _takes_turns(step: Prediction) -> bool:
    """Whether a forward of one microbatch comes between those of another."""
    spans = [span for device in step.devices for span in device.spans if span.task.kind is Phase.FORWARD]
    order = [
        number for number, _ in groupby(span.task.microbatch for span in sorted(spans, key=lambda s: s.start_seconds))
    ]
    return len(order) > len(set(order))
