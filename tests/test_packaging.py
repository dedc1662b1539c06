"""What a stranger gets: a wheel with its data, matching environments, valid metadata, pages that hold together."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(lines) -> dict[str, str]:
    found = (re.fullmatch(r"([\w.-]+)==(\S+)", str(line).strip()) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text().splitlines())
DIRECT = {
    canonicalize_name(requirement.name): requirement
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, group)
}


# ---- environments ----


def test_every_direct_dependency_has_a_tested_version_that_fits():
    for name, requirement in DIRECT.items():
        assert name in CONSTRAINTS, f"{name} has no version in constraints.txt"
        assert requirement.specifier.contains(Version(CONSTRAINTS[name])), name


def test_conda_users_get_the_same_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "gramlin"
    (python,) = [line for line in environment["dependencies"] if str(line).startswith("python=")]
    assert Version(python.split("=")[1]) in Requirement(f"python{PROJECT['requires-python']}").specifier
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pins(pip) == {name: CONSTRAINTS[name] for name in DIRECT}
    assert "--constraint constraints.txt" in pip
    assert "--editable ." in pip


def test_this_environment_has_the_tested_versions():
    for name in DIRECT:
        installed = importlib.metadata.version(name)
        assert installed.split("+")[0] == CONSTRAINTS[name], f"{name} is {installed}, tested is {CONSTRAINTS[name]}"


# ---- the wheel ----


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("gramlin-*.whl")
    return path


def test_the_wheel_holds_the_package_its_data_and_its_licences(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "gramlin/embedded/fashion-mnist-mini.npz" in names
    assert "gramlin/embedded/LICENSE-fashion-mnist" in names
    assert "gramlin/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "book", "results"))]


def closure_of_requirements(wheel: Path, extra: str = "") -> set[str]:
    """The distributions that the wheel's own metadata asks for, for itself and for an extra, and theirs."""
    metadata = zipfile.Path(wheel, f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/METADATA").read_text()
    declared = [
        line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")
    ]
    todo, done = [(line, each) for line in declared for each in {"", extra}], set()
    while todo:
        line, extra = todo.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({**default_environment(), "extra": extra}):
            continue
        wanted = {(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)}
        for name, of_extra in wanted - done:
            done.add((name, of_extra))
            todo += [(each, of_extra) for each in importlib.metadata.requires(name) or []]
    return {name for name, _ in done}


def install(wheel: Path, home: Path, extra: str = "") -> tuple[Path, Path]:
    """Make a new environment with the wheel, as pip would leave it; returns its Python and the folder of its packages.

    The distributions that the wheel's metadata names are linked from this one, without another five gigabytes.
    """
    venv.create(home, symlinks=True, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    for name in closure_of_requirements(wheel, extra):
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return home / "bin" / "python", site


def test_the_wheel_works_offline_in_an_environment_of_its_own(wheel, tmp_path):
    python, site = install(wheel, tmp_path / "environment")
    code = """
        import socket
        def refuse(*args, **kwargs): raise OSError("no network here")
        socket.socket.connect = socket.create_connection = refuse
        import gramlin
        from gramlin import data
        print(gramlin.__file__)
        print(data.load("fashion-mnist-mini"))
        """
    done = subprocess.run(
        [python, "-I", "-c", "\n".join(line.strip() for line in code.splitlines())],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    where, what = done.stdout.splitlines()
    assert where.startswith(str(site))
    assert what == "<fashion-mnist-mini: 10000 + 2000 inputs of 1×28×28, 10 classes>"


@pytest.fixture(scope="module")
def reader(wheel, tmp_path_factory) -> Path:
    """Python of a reader who has done ``pip install gramlin[book]``."""
    return install(wheel, tmp_path_factory.mktemp("reader") / "environment", "book")[0]


@pytest.mark.parametrize("chapter", sorted((ROOT / "book").glob("0*.ipynb")), ids=lambda path: path.stem[:2])
def test_a_downloaded_chapter_runs_against_the_installed_package(reader, chapter, tmp_path):
    shutil.copy(chapter, tmp_path)
    (tmp_path / "results").mkdir()
    # No Python path and no results but those of this folder, which is empty.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [reader, "-m", "papermill", chapter.name, "out.ipynb", "-p", "results_dir", "results", "--no-progress-bar"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads((tmp_path / "out.ipynb").read_text(encoding="utf-8"))["cells"]
    printed = "".join([cell for cell in cells if cell["cell_type"] == "code"][-1]["outputs"][0]["text"])
    assert " ok " in printed
    assert "FAILED" not in printed


# ---- metadata and pages ----


def test_citation_is_valid_and_cites_book_and_paper():
    from cffconvert import Citation

    citation = Citation((ROOT / "CITATION.cff").read_text())
    citation.validate()
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert content["version"] == PROJECT["version"]
    assert any(each["value"] == "arXiv:2605.06258" for each in content["references"][0]["identifiers"])


def test_version_is_the_same_everywhere():
    import gramlin

    assert gramlin.__version__ == PROJECT["version"]


def test_every_page_of_the_book_is_in_its_contents():
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = {contents["root"], *(chapter["file"] for part in contents["parts"] for chapter in part["chapters"])}
    pages = {
        str(path.relative_to(ROOT).with_suffix(""))
        for kind in ("md", "ipynb")
        for path in (ROOT / "book").glob(f"*.{kind}")
    }
    assert pages == listed


def test_configuration_has_only_keys_that_jupyter_book_reads():
    # An unknown key is dropped without a word.
    from jupyter_book.config import PATH_YAML_DEFAULT

    known, ours = yaml.safe_load(PATH_YAML_DEFAULT.read_text()), yaml.safe_load((ROOT / "_config.yml").read_text())
    assert set(ours) <= {*known, "bibtex_bibfiles"}
    for section in ("execute", "parse", "html"):
        assert set(ours.get(section, {})) <= set(known[section]), section


# The commands of TeX that the pages may use, beside the macros of _config.yml: an unknown one renders in red, and no
# build says so.
TEX = re.findall(
    r"\w+",
    "Bigl Bigr Delta Lambda Omega Pi Sigma Vert alpha approx bar begin beta bigl bigr cdot cos cosh ddot delta det "
    "dot dots end eta exp frac ge gg in int kappa lVert lambda langle le ll ln mapsto mathbb mathbf mathcal mathrm "
    "max min mu nabla ne omega operatorname partial phantom phi pm propto qquad quad rVert rangle sigma sim sinh sqrt "
    "sum tau text textbf theta tfrac tilde times to top varepsilon",
)


def test_tex_of_the_pages_is_balanced_and_uses_known_commands():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]
    known = {*TEX, *config["mathjax3_config"]["tex"]["macros"]}
    for path in (ROOT / "book").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type != "markdown":
                continue
            where = f"{path.name}, cell {cell.id}"
            used = set(re.findall(r"\\([A-Za-z]+)", cell.source))
            assert used <= known, f"{where}: unknown TeX {used - known}"
            for left, right in (("\\Bigl", "\\Bigr"), ("\\bigl", "\\bigr"), ("\\begin{", "\\end{"), ("{", "}")):
                assert cell.source.count(left) == cell.source.count(right), f"{where}: {left} without {right}"


def test_labels_that_docstrings_cite_are_in_the_book():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "book").glob("*.ipynb"))
    defined = set(re.findall(r":label: (eq:[a-z0-9-]+)", pages))
    for path in (ROOT / "gramlin").rglob("*.py"):
        cited = set(re.findall(r"``(eq:[a-z0-9-]+)``", path.read_text(encoding="utf-8")))
        assert cited <= defined, f"{path.name} cites {cited - defined}"
