"""What chapters cost: measured, and read off stored runs."""

import nbformat

from gramlin import costs
from gramlin.results import ResultsStore, Run


def test_costs_are_those_of_the_stored_runs(tmp_path):
    store = ResultsStore(tmp_path)
    for chapter, seconds in ((1, 30.0), (4, 50.0)):
        metrics = {"peak_mebibytes": 1536}
        store.save(Run("cost", {"chapter": chapter}, metrics, wall_seconds=seconds, device="cpu, 1 threads"))
    for seed, minutes in enumerate((2, 4, 9)):
        run = Run("whitening", {"seed": seed}, {}, wall_seconds=60.0 * minutes, device="cpu, 1 threads")
        store.save(run)
    store.save(Run("whitening", {"seed": 9}, {}, wall_seconds=30.0, device="NVIDIA X"))
    table = costs.cost_table(store)
    assert table.loc[1, "quick, CPU: seconds"] == "30"
    assert table.loc[4, "quick, CPU: GiB"] == "1.5"
    assert table.loc[2, "quick, CPU: GiB"] == "–"
    columns = [f"paper, {kind}: {what}" for kind in ("CPU", "GPU") for what in ("runs stored", "median minutes")]
    assert table.loc[2, columns].tolist() == [3, "4", 1, "0"]
    assert table.loc[2, "paper, CPU: hours in all"] == "0.2"
    assert table.loc[3, columns].tolist() == ["–"] * 4
    assert table.loc[5, "paper: runs on mnist, 3 seeds"] == 18
    assert table.loc[4, "paper: runs on cifar10, 3 seeds"] == 6
    assert len(costs.cost_settings()) == 5


def test_the_cost_of_a_chapter_is_measured_by_running_it(monkeypatch, tmp_path):
    chapter = tmp_path / "01_held.ipynb"
    cells = [
        nbformat.v4.new_code_cell("device = 'cpu'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("held = bytearray(200 * 2**20)"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), chapter)
    monkeypatch.setattr(costs.book, "find_chapter", lambda name: chapter)
    assert costs.measure_cost(chapter=1)["peak_mebibytes"] > 200


def test_costs_of_a_gpu_stand_beside_those_of_a_cpu():
    assert costs.cost_settings("cuda")[0] == {"chapter": 1, "gpu": True}
    assert costs.cost_settings()[0] == {"chapter": 1}
