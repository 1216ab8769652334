"""Progress that remembers what it was told."""

from upscalers.request import Progress


class Recorder(Progress):
    """Remembers whether it was shown, warnings, and stages: name, steps announced, and steps told one after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.stages: list[tuple[str, int, list[int]]] = []
        self.warnings: list[str] = []

    def start(self) -> None:
        self.shown.append("start")

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        self.stages.append((name, num_steps, []))

    def advance(self, num_steps: int = 1) -> None:
        self.stages[-1][2].append(num_steps)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def finish(self) -> None:
        self.shown.append("finish")

    @property
    def names(self) -> list[str]:
        """Names of the stages."""
        return [name for name, _, _ in self.stages]

    def told_of(self, name: str) -> list[int]:
        """Return the steps that were told of a stage."""
        return next(steps for stage, _, steps in self.stages if stage == name)

    @property
    def balanced(self) -> bool:
        """Whether every stage took the steps it announced."""
        return all(sum(report) == announced > 0 for _, announced, report in self.stages)
