"""The paper's claims that chapter 2 puts to the test."""

from collections.abc import Callable, Iterable

from gramlin.chapters.claims import Claim, Finding, last_date
from gramlin.chapters.summaries import select
from gramlin.chapters.whitening.tables import accuracy_difference, whitening_table
from gramlin.results import ResultsStore


def _whitening(model: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        runs = select(store.runs("whitening"), model=model, lr=0.01)
        runs = [run for run in runs if run.settings["method"] in ("sgd", "whitened")]
        for (dataset, _, _), row in whitening_table(runs).iterrows():
            own = select(runs, dataset=dataset)
            difference = accuracy_difference(own, "whitened", "sgd")
            data = f"{dataset}, {model.upper()}"
            yield Finding(data, f"whitened − SGD: {difference} points", row["seeds"], row["verdict"], last_date(own))

    return findings


CLAIMS = (
    Claim(
        "C4",
        "An MLP trained by whitened updates matches SGD or exceeds it.",
        "curves",
        "the 95% interval of whitened − SGD, at η = 0.01, excludes a loss of more than a point of test accuracy, so a "
        "smaller loss passes; other learning rates, with two seeds, are in the chapter",
        _whitening("mlp"),
    ),
    Claim("C4b", "So does a CNN.", "curves", "as C4", _whitening("cnn")),
)
