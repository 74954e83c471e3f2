"""Where rows come from, how they are split, and what is said when they are not usable."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.config.tree import TaskConfig
from grpofit.data import tasks
from grpofit.data.tasks import load_task
from grpofit.errors import DataError

HERE = Path(".")


def load(base_dir: Path = HERE, **keys):
    return load_task(TaskConfig(**keys), base_dir)


def write_jsonl(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def explained(base_dir: Path, **keys) -> str:
    """The text of the DataError that loading must raise, with all four parts."""
    with pytest.raises(DataError) as caught:
        load(base_dir, **keys)
    assert [label for label, _ in caught.value.parts()] == ["got", "why", "fix"]
    return str(caught.value)


def terms(row: dict) -> tuple[int, str, int]:
    a, sign, b = row["question"].replace("(", "").replace(")", "").split()
    return int(a), sign, int(b)


def result(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


class TestArithmetic:
    def test_default_is_sums_up_to_twenty(self):
        task = load(name="arithmetic")
        assert len(task.heldout) == 200
        assert 199 <= len(task.train) <= 200
        assert all(1 <= a <= 20 and 1 <= b <= 20 and s == "+" for a, s, b in map(terms, task.train + task.heldout))

    @given(
        operations=st.sets(st.sampled_from(["add", "sub", "mul"]), min_size=1),
        low=st.integers(-4, 3),
        span=st.integers(4, 9),
        seed=st.integers(0, 3),
        eval_size=st.integers(1, 8),
    )
    @settings(max_examples=30, deadline=None)
    def test_no_heldout_problem_nor_its_mirror_is_trained(self, operations, low, span, seed, eval_size):
        task = load(
            name="arithmetic",
            operations=sorted(operations),
            terms=(low, low + span - 1),
            split_seed=seed,
            eval_size=eval_size,
        )
        train, heldout = list(map(terms, task.train)), list(map(terms, task.heldout))
        assert len(heldout) == eval_size
        assert len(set(train + heldout)) == len(train) + len(heldout)
        assert len(operations) * span**2 - len(train) - len(heldout) <= 1  # at most the mirror of the last one
        trained = set(train) | {(b, sign, a) for a, sign, b in train if sign != "-"}
        assert not trained & set(heldout)
        assert all(int(row["answer"]) == result(*terms(row)) for row in task.train + task.heldout)

    def test_large_space_is_drawn_not_listed(self, monkeypatch):
        def refuse(*_):
            raise AssertionError("listed a space of a trillion problems")

        monkeypatch.setattr(tasks, "_listed_order", refuse)
        task = load(name="arithmetic", terms=(1, 10**6), train_size=500)
        assert (len(task.train), len(task.heldout)) == (500, 200)
        train = {frozenset((a, b)) for a, _, b in map(terms, task.train)}
        assert not train & {frozenset((a, b)) for a, _, b in map(terms, task.heldout)}

    def test_drawn_and_listed_agree_in_size(self, monkeypatch):
        monkeypatch.setattr(tasks, "_LISTED_PROBLEMS", 100)
        task = load(name="arithmetic", terms=(1, 30), train_size=300, eval_size=50)
        assert (len(task.train), len(task.heldout)) == (300, 50)
        # More than half of a space that is not listed by size would be drawn for ever.
        assert len(load(name="arithmetic", terms=(1, 30), eval_size=50).train) >= 849

    def test_training_rows_are_limited_to_twenty_thousand(self):
        assert len(load(name="arithmetic", terms=(1, 300)).train) == 20_000

    def test_split_seed_alone_decides(self):
        assert load(name="arithmetic").heldout == load(name="arithmetic").heldout
        assert load(name="arithmetic").heldout != load(name="arithmetic", split_seed=1).heldout

    def test_negative_terms_are_in_parentheses(self):
        rows = load(name="arithmetic", terms=(-2, -1), eval_size=1).train
        assert {row["question"] for row in rows} <= {"-1 + (-1)", "-2 + (-2)", "-1 + (-2)", "-2 + (-1)"}

    def test_more_heldout_than_half(self):
        assert "--set task.eval_size=25" in explained(HERE, name="arithmetic", terms=(1, 10))

    def test_a_template_over_a_missing_column(self):
        assert "columns: question, answer" in explained(HERE, name="arithmetic", prompt="{{ questoin }}")


ROWS = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(20)]


class TestFiles:
    def test_jsonl_csv_and_parquet_are_the_same_task(self, tmp_path):
        write_jsonl(tmp_path / "rows.jsonl", ROWS)
        with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
        loaded = [load(tmp_path, file=f"rows.{kind}", eval_size=4) for kind in ("jsonl", "csv", "parquet")]
        assert (len(loaded[0].train), len(loaded[0].heldout)) == (16, 4)
        assert all((task.train, task.heldout) == (loaded[0].train, loaded[0].heldout) for task in loaded)
        assert loaded[0].columns == ("prompt", "answer")

    def test_split_follows_content_not_position(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl", ROWS)
        write_jsonl(tmp_path / "b.jsonl", ROWS[::-1])
        a, b = load(tmp_path, file="a.jsonl", eval_size=4), load(tmp_path, file="b.jsonl", eval_size=4)
        assert a.heldout == b.heldout[::-1]
        assert a.heldout != load(tmp_path, file="a.jsonl", eval_size=4, split_seed=7).heldout

    def test_copies_of_a_row_stay_on_one_side(self, tmp_path):
        write_jsonl(tmp_path / "rows.jsonl", ROWS * 3)
        task = load(tmp_path, file="rows.jsonl", eval_size=5)
        heldout = [row["answer"] for row in task.heldout]
        assert len(set(heldout)) == 5
        assert len(task.train) == 45
        assert not set(heldout) & {row["answer"] for row in task.train}

    def test_train_size_takes_rows_by_content_in_file_order(self, tmp_path):
        write_jsonl(tmp_path / "rows.jsonl", ROWS)
        train = [int(row["answer"]) for row in load(tmp_path, file="rows.jsonl", eval_size=4, train_size=7).train]
        assert len(train) == 7
        assert train == sorted(train)

    def test_eval_file(self, tmp_path):
        write_jsonl(tmp_path / "rows.jsonl", ROWS)
        write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "new"}, ROWS[3]])
        task = load(tmp_path, file="rows.jsonl", eval_file="eval.jsonl", eval_size=10)
        assert (len(task.train), len(task.heldout)) == (20, 2)
        assert "1 of the 2 held-out rows" in task.notes[0]
        assert "all 2 rows" in task.notes[1]

    def test_answer_template(self, tmp_path):
        write_jsonl(
            tmp_path / "rows.jsonl", [{"prompt": "a", "sol": {"text": "4"}}, {"prompt": "b", "sol": {"text": 5}}]
        )
        task = load(tmp_path, file="rows.jsonl", eval_size=1, answer="{{ sol.text }}")
        assert {row["answer"] for row in task.train + task.heldout} == {"4", "5"}

    def test_blank_lines_and_a_byte_order_mark(self, tmp_path):
        (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}\n')
        task = load(tmp_path, file="rows.jsonl", eval_size=1)
        assert {row["prompt"] for row in task.train + task.heldout} == {"a", "b"}

    @pytest.mark.parametrize(
        ("content", "part"),
        [
            ("", "has no rows"),
            ('{"prompt": "a"}\n{"prompt": \n', 'line 2 of "rows.jsonl"'),
            ('{"prompt": "a"}\n[1]\n', "a JSON list, not an object"),
            ('[{"prompt": "a"}]', "jq -c"),
            ('{"prompt": "a"}\n\n{"question": "b"}\n', 'line 3 of "rows.jsonl" has no prompt'),
            ('{"prompt": "a"}\n{"question": "b"}\n', "columns: question"),
            ('{"prompt": ""}\n', "has no prompt"),
            ('{"prompt": null}\n', "has no prompt"),
            ('{"prompt": 3}\n', "neither text nor a list of messages"),
            ('{"prompt": [{"text": "a"}]}\n', "neither text nor a list of messages"),
            ('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n', "--set task.eval_size=1"),
        ],
    )
    def test_broken_jsonl(self, tmp_path, content, part):
        (tmp_path / "rows.jsonl").write_text(content)
        assert part in explained(tmp_path, file="rows.jsonl")

    def test_not_utf8(self, tmp_path):
        (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
        assert "line 2" in explained(tmp_path, file="rows.jsonl")

    @pytest.mark.parametrize(
        ("name", "content", "part"),
        [
            ("rows.csv", "prompt,answer\na,1\nb\n", "line 3"),
            ("rows.csv", "prompt,answer\na,1,2\n", "3 fields"),
            ("rows.csv", 'prompt,answer\n"a,1\n', "cannot be read"),
            ("rows.csv", "prompt,answer\n", "has no rows"),
            ("rows.parquet", "not parquet", "cannot be read"),
            ("rows.txt", "a", "unknown kind"),
        ],
    )
    def test_other_broken_files(self, tmp_path, name, content, part):
        (tmp_path / name).write_text(content)
        assert part in explained(tmp_path, file=name)

    def test_missing_file_names_the_nearest(self, tmp_path):
        write_jsonl(tmp_path / "rows.jsonl", ROWS)
        assert 'did you mean "rows.jsonl"?' in explained(tmp_path, file="row.jsonl")

    def test_unreadable_file(self, tmp_path):
        (tmp_path / "rows.jsonl").mkdir()
        assert "is not a file" in explained(tmp_path, file="rows.jsonl")

    def test_templates(self, tmp_path):
        write_jsonl(tmp_path / "rows.jsonl", [{"q": "a"}, {"q": "b", "r": "c"}])
        text = explained(tmp_path, file="rows.jsonl", prompt="{{ r }}", eval_size=1)
        assert 'line 1 of "rows.jsonl"' in text
        assert "columns: q" in text
        assert "is not a Jinja template" in explained(tmp_path, file="rows.jsonl", prompt="{{ q")
        assert "task.answer" in explained(tmp_path, file="rows.jsonl", prompt="{{ q }}", answer="{{ a }}")
        assert "could not be rendered" in explained(tmp_path, file="rows.jsonl", prompt="{{ q / 2 }}")
        attack = "{{ q.__class__.__mro__[1].__subclasses__() }}"
        assert "unsafe" in explained(tmp_path, file="rows.jsonl", prompt=attack)
        optional = "{{ r if r is defined else q }}"
        assert len(load(tmp_path, file="rows.jsonl", prompt=optional, eval_size=1).train) == 1


class TestDatasets:
    def test_saved_to_disk(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(10)])
        datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(tmp_path / "both")
        rows.save_to_disk(tmp_path / "one")
        both = load(tmp_path, dataset="both", eval_split="test", eval_size=2)
        assert (len(both.train), len(both.heldout)) == (10, 2)
        assert "3 of the 3 held-out rows" in both.notes[0]
        one = load(tmp_path, dataset="one", eval_size=2)
        assert (len(one.train), len(one.heldout)) == (8, 2)
        assert "there are: train, test" in explained(tmp_path, dataset="both", split="dev")

    def test_a_folder_of_data_files(self, tmp_path, monkeypatch):
        pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "folder").mkdir()
        write_jsonl(tmp_path / "folder" / "train.jsonl", [{"prompt": str(i)} for i in range(10)])
        assert len(load(tmp_path, dataset="folder", eval_size=2).train) == 8

    @pytest.mark.parametrize("keys", [{"name": "gsm8k"}, {"dataset": "no-such-owner/no-such-set"}])
    def test_offline_and_not_in_the_cache(self, tmp_path, monkeypatch, keys):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        text = explained(tmp_path, **keys)
        assert "HF_HUB_OFFLINE" in text
        assert "load_dataset(" in text

    def test_gsm8k_rows(self, monkeypatch):
        table = tasks.Table(
            "openai/gsm8k[train]",
            [{"question": f"q{i}", "answer": f"<<1+1=2>> so\n#### {i},000"} for i in range(4)],
            range(1, 5),
        )
        monkeypatch.setattr(tasks, "read_dataset", lambda *_: table)
        task = load(name="gsm8k", eval_size=2)
        assert task.train[1] == {"question": "q1", "answer": "1000", "solution": "<<1+1=2>> so\n#### 1,000"}
        assert len(task.heldout) == 2


def test_unknown_task():
    assert 'did you mean "arithmetic"?' in explained(HERE, name="arithmetics")
