"""The scorecard judges as the chapters do, and has every claim."""

import pandas as pd

from gramlin.chapters.scorecard import scorecard, summary
from gramlin.results import ResultsStore
from tests.chapters.test_collapse import collapsed
from tests.chapters.test_feature_learning import stored
from tests.chapters.test_interpolation import encoded


def test_the_scorecard_has_every_claim_and_says_how_to_run_what_was_not(tmp_path):
    table = scorecard(ResultsStore(tmp_path), {})
    assert table["claim"].drop_duplicates().tolist() == [
        *(
            "C1",
            "C2",
            "C3",
            "C4",
            "C4b",
            "C5",
            "C5b",
            "C6",
            "C7",
            "C8a",
            "C8b",
            "C8c",
            "C8d",
            "C9",
            "C10",
            "C11",
            "C12",
        ),
    ]
    assert set(table["verdict"][:13]) == {"not yet run"}
    assert set(table["verdict"][13:]) == {"not taken up yet"}
    commands = table.drop_duplicates("claim").set_index("claim")["command"]
    assert commands[["C1", "C2", "C8a", "C9"]].tolist() == [
        *("gramlin run 1", "gramlin run 1 --profile paper", "gramlin run 5 --profile paper", ""),
    ]


def test_the_scorecard_judges_as_the_chapters_do(tmp_path):
    store = ResultsStore(tmp_path)
    for run in [
        *stored("digits", [0.9, 0.91, 0.92], [0.5, 0.52, 0.51]),
        *(collapsed([{"tl": [0.4, 0.9, 0.99], "nc1": [3.0, 0.5, 0.01]}])),
        *encoded({0.1: [(0.7, 0.8), (0.71, 0.81)], 10.0: [(0.5, 0.97), (0.51, 0.98)]}),
    ]:
        store.save(run)
    table = scorecard(store, {"C1": True, "C3": False}).set_index("claim")
    assert table.loc["C1", "verdict"] == "reproduced"
    assert table.loc["C3", "verdict"] == "not reproduced"
    row = table.loc["C2"]
    assert (row["verdict"], row["seeds"], row["profile"]) == ("reproduced", 3, "paper")
    assert row["here"] == "virtual 0.910 ± 0.010, AGOP 0.510 ± 0.010"
    assert table.loc["C7", "verdict"] == "not decided by one seed"
    verdicts = table.loc[["C8a", "C8b", "C8c", "C8d"], "verdict"].tolist()
    assert verdicts == ["reproduced", "reproduced", "not reproduced", "holds"]
    assert table.loc["C8a", "here"] == "TL by +0.305, +0.105 for β = 0.1, 10"
    assert table.loc["C8b", "here"] == "TL 0.705, 0.505 for β = 0.1, 10"
    found = summary(table.reset_index()).set_index("claim")["found"]
    assert found["C2"] == "reproduced"
    assert found["C4"] == "not yet run"


def test_the_summary_counts_sets_of_runs():
    words = ("undecided", "not reproduced", "reproduced", "reproduced")
    table = pd.DataFrame([("C2", "x", word) for word in words], columns=["claim", "says", "verdict"])
    assert summary(table)["found"].tolist() == ["2 × reproduced, 1 × not reproduced, 1 × undecided"]
