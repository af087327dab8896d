"""Runs in TensorBoard and MLflow, read back with these tools themselves. The run folders hold made-up figures, so that all is known."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.export import mlflow, tensorboard
from lockstep.export.facts import Chosen, facts
from lockstep.measure.events import EventFile
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Optimizer, Recipe
from lockstep.run import Run, Spec, append_line, write_atomic

BEGAN = 1_700_000_000.0


def made(root: Path, name: str, ranks: int = 2, state: str = "done", epochs: int = 2) -> Run:
    """A run folder as a run leaves it, two epochs of ten steps."""
    recipe = Recipe(global_batch=32, epochs=2, optimizer=Optimizer(lr=0.125), model_args={"k": 3}, seed=5)
    placement = Placement(ranks=ranks, threads=1, launcher="spawn", backend="gloo", strategy="ddp")
    worked = plan(recipe, placement, 320, 100)
    spec = Spec(id=name, created=BEGAN, lockstep="0.1", recipe=recipe, placement=placement, plan=worked)
    run = Run.create(root, spec)
    for epoch in range(1, epochs + 1):
        append_line(
            run.folder / "epochs.jsonl",
            {
                "epoch": epoch,
                "step": 10 * epoch,
                "train_loss": 1 / epoch,
                "test_loss": 2 / epoch,
                "test_accuracy": 0.25 * epoch,
                "train_accuracy": None,  # a loop of one's own may not tell
                "train_seconds": 3.0,
                "time": BEGAN + 10 * epoch,
            },
        )
    for rank in range(ranks):
        events = EventFile(run.folder / "tensorboard" / f"rank{rank:04d}")
        events.scalars(10, {"train/loss": 1.0 + rank})
        events.close()
    write_atomic(run.folder / "environment.json", {"cpu": "EPYC", "torch": "2.13.0"}, durable=False)
    if state == "done":
        summary = {
            "train_seconds": 6.0,
            "test_accuracy": 0.5,
            "stopped_by": None,
            "memory_growth_bytes": [7, None][:ranks],
            "numbers": {"skipped_steps": 4},
            "ranks_agree": True,
        }
        write_atomic(run.folder / "summary.json", summary, durable=False)
    end = {"cause": "rank 1 was killed"} if state == "failed" else {}
    write_atomic(run.folder / "status.json", {"state": state, "since": BEGAN + 60, **end}, durable=False)
    return run


def test_what_a_run_tells(tmp_path: Path) -> None:
    found = facts(Chosen(made(tmp_path, "one"), "batch-size", "ranks=2"))
    assert found.settings["optimizer.lr"] == 0.125
    assert (found.settings["ranks"], found.settings["model_args.k"]) == (2, 3)
    assert "micro_batch" not in found.settings, "what was not set is not told"
    assert [(point.epoch, point.step, point.at) for point in found.curve] == [
        (1, 10, BEGAN + 10),
        (2, 20, BEGAN + 20),
    ]
    assert found.curve[1].values == {"train_loss": 0.5, "test_loss": 1.0, "test_accuracy": 0.5, "train_seconds": 3.0}
    assert found.final.values == {
        "train_seconds": 6.0,
        "test_accuracy": 0.5,
        "memory_growth_bytes": 7.0,
        "numbers.skipped_steps": 4.0,
    }
    assert found.labels == {
        "state": "done",
        "study": "batch-size",
        "cell": "ranks=2",
        "cpu": "EPYC",
        "torch": "2.13.0",
        "lockstep": "0.1",
        "ranks_agree": "True",
    }
    assert (found.started, found.ended) == (BEGAN, BEGAN + 60)


def hparams(folder: Path) -> tuple[Any, Any, Any]:
    """The columns, the sessions and the reader that TensorBoard's own HParams tab has of a folder."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

    reader = EventMultiplexer().AddRunsFromDirectory(str(folder))
    reader.Reload()
    context = backend_context.Context(
        base_plugin.TBContext(data_provider=MultiplexerDataProvider(reader, str(folder)), logdir=str(folder))
    )
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, slice_size=100)
    columns = get_experiment.Handler(RequestContext(), context, "", api_pb2.GetExperimentRequest()).run()
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run()
    return columns, {group.name: group for group in groups.session_groups}, reader


def test_tensorboard_reads_the_settings_the_curves_and_the_results(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2

    runs, board = tmp_path / "runs", tmp_path / "board"
    chosen = [
        Chosen(made(runs, "one", ranks=1), "batch-size", "ranks=1"),
        Chosen(made(runs, "two", ranks=2), "batch-size", "ranks=2"),
        Chosen(made(runs, "broken", state="failed", epochs=0)),
    ]
    assert tensorboard.write(chosen, board) == (f"3 runs in {board}", f"tensorboard --logdir {board}")
    tensorboard.write(chosen, board)  # again: replaced, not doubled

    columns, sessions, reader = hparams(board)
    assert set(sessions) == {"one", "two", "broken"}, "the ranks are no sessions"
    differing = {info.name for info in columns.hparam_infos if info.differs}
    assert differing == {"ranks", "cell"}
    assert {info.name.group for info in columns.metric_infos} == {""}, "no column a rank"
    two = sessions["two"]
    assert two.hparams["optimizer.lr"].number_value == 0.125
    assert two.hparams["ranks"].number_value == 2
    assert two.hparams["pin"].bool_value is True
    assert two.hparams["cell"].string_value == "ranks=2"
    assert "micro_batch" not in two.hparams
    values = {value.name.tag: value.value for value in two.metric_values}
    assert values["test/loss"] == 1.0
    assert values["final/train_seconds"] == 6.0
    (session,) = two.sessions
    assert (session.start_time_secs, session.end_time_secs) == (BEGAN, BEGAN + 60)
    assert session.status == api_pb2.STATUS_SUCCESS
    assert sessions["broken"].sessions[0].status == api_pb2.STATUS_FAILURE

    points = reader.Tensors("two", "test/accuracy")
    assert [(point.step, point.wall_time) for point in points] == [(10, BEGAN + 10), (20, BEGAN + 20)]
    assert [len(reader.Tensors(f"ranks/two/rank000{rank}", "train/loss")) for rank in (0, 1)] == [1, 1]


def test_a_run_under_way_has_no_end_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2

    tensorboard.write([Chosen(made(tmp_path / "runs", "now", state="running", epochs=1))], tmp_path / "board")
    _, sessions, _ = hparams(tmp_path / "board")
    assert sessions["now"].sessions[0].status == api_pb2.STATUS_UNKNOWN


def test_without_mlflow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(InputError, match=r"pip install 'lockstep-bench\[mlflow\]'"):
        mlflow.write([Chosen(made(tmp_path, "one"))], tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.fixture(scope="module")
def real_mlflow() -> Any:
    for name in ("sqlalchemy", "alembic"):
        pytest.importorskip(name, reason="needs MLflow: pip install 'lockstep-bench[mlflow]'")
    return pytest.importorskip("mlflow", reason="needs MLflow: pip install 'lockstep-bench[mlflow]'")


def test_mlflow_reads_settings_curves_labels_and_times(tmp_path: Path, real_mlflow: Any) -> None:
    runs, store = tmp_path / "runs", tmp_path / "my store"
    chosen = [
        Chosen(made(runs, "one", ranks=1), "batch-size", "ranks=1"),
        Chosen(made(runs, "broken", state="failed", epochs=1), "batch-size", "ranks=2"),
        Chosen(made(runs, "now", state="running", epochs=1)),
    ]
    command = f"mlflow ui --backend-store-uri 'sqlite:///{store}/mlflow.db'"
    assert mlflow.write(chosen, store) == (f"3 runs in {store}", command)
    # Meanwhile one has gone on to its end; exported again, it is the same MLflow run, with what is new.
    shutil.rmtree(runs / "now")
    made(runs, "now")
    mlflow.write(chosen, store)

    client = real_mlflow.MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    found = {
        run.info.run_name: run
        for experiment in client.search_experiments()
        for run in client.search_runs([experiment.experiment_id])
    }
    assert set(found) == {"one", "broken", "now"}
    assert sum(len(client.search_runs([each.experiment_id])) for each in client.search_experiments()) == 3
    one = found["one"]
    assert client.get_experiment(one.info.experiment_id).name == "batch-size"
    assert client.get_experiment(found["now"].info.experiment_id).name == "lockstep"
    assert one.data.params["optimizer.lr"] == "0.125"
    assert one.data.params["ranks"] == "1"
    assert "micro_batch" not in one.data.params
    history = client.get_metric_history(one.info.run_id, "test_accuracy")
    assert [(point.step, point.value, point.timestamp) for point in history] == [
        (1, 0.25, 1_700_000_010_000),
        (2, 0.5, 1_700_000_020_000),
    ]
    assert one.data.metrics["final_train_seconds"] == 6.0
    assert one.data.tags["lockstep.cell"] == "ranks=1"
    assert one.data.tags["lockstep.cpu"] == "EPYC"
    assert (one.info.start_time, one.info.end_time) == (1_700_000_000_000, 1_700_000_060_000)
    assert [found[name].info.status for name in ("one", "broken", "now")] == ["FINISHED", "FAILED", "FINISHED"]
    assert found["broken"].data.tags["lockstep.cause"] == "rank 1 was killed"
    assert [point.step for point in client.get_metric_history(found["now"].info.run_id, "test_loss")] == [1, 2]


def test_a_store_that_is_none_is_an_error_in_one_line(tmp_path: Path, real_mlflow: Any) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "mlflow.db").write_text("no database")
    with pytest.raises(InputError, match="store"):
        mlflow.write([Chosen(made(tmp_path / "runs", "one"))], store)
