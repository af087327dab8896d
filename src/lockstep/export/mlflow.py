"""Runs as an MLflow tracking store: DIR/mlflow.db, one experiment per study, one MLflow run per run.

MLflow itself writes it. MLflow 3.13 and later refuse to open the older store, a tree of files that could be written by hand; the
tables of the database change with the version of MLflow, and only MLflow knows how.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, first_line
from lockstep.export.facts import Chosen, Facts, Point, facts
from lockstep.export.writers import Store
from lockstep.units import counted

DATABASE = "mlflow.db"
NO_STUDY = "lockstep"
"""The experiment of runs that were named one by one."""
_NAMED = "lockstep.run"
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stalled": "FAILED", "cancelled": "KILLED", "planned": "SCHEDULED"}
# The most that MLflow accepts in one call.
_METRICS, _PARAMS = 900, 90


def write(chosen: Sequence[Chosen], folder: Path) -> Store:
    """Write into the store in `folder`, which is created if missing.

    Runs that are already there are updated, so nothing is there twice.
    """
    mlflow = _mlflow()
    folder.mkdir(exist_ok=True)
    uri = f"sqlite:///{folder.absolute() / DATABASE}"
    with _quiet(), contextlib.chdir(folder):  # MLflow puts its folder for other files into the current folder
        try:
            client = mlflow.MlflowClient(uri)
            experiments = {name: _experiment(client, name) for name in {one.study or NO_STUDY for one in chosen}}
            for one in chosen:
                _run(mlflow, client, experiments[one.study or NO_STUDY], facts(one))
        except (mlflow.MlflowException, import_module("sqlalchemy").exc.SQLAlchemyError) as error:
            raise InputError(f"-o {folder}: MLflow: {first_line(error)}") from None
    return Store(f"{counted(len(chosen), 'run')} in {folder}", f"mlflow ui --backend-store-uri {shlex.quote(uri)}")


def _mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # an export sends no telemetry
    try:
        import_module("sqlalchemy")
        import_module("alembic")
        return import_module("mlflow")
    except ImportError:
        raise InputError("--format mlflow needs MLflow: pip install 'lockstep-bench[mlflow]'") from None


def _experiment(client: Any, name: str) -> str:
    there = client.get_experiment_by_name(name)
    return str(there.experiment_id if there else client.create_experiment(name))


def _run(mlflow: Any, client: Any, experiment: str, found: Facts) -> None:
    entities = mlflow.entities
    identity = _there(client, experiment, found.id) or client.create_run(
        experiment, start_time=_ms(found.started), run_name=found.id, tags={_NAMED: found.id}
    )
    run = identity.info.run_id
    params = [entities.Param(key, str(value)) for key, value in found.settings.items()]
    tags = [entities.RunTag(f"lockstep.{key}", value) for key, value in found.labels.items()]
    metrics = [
        entities.Metric(key, value, _ms(point.at), point.epoch)
        for point in [*found.curve, _final(found.final)]
        for key, value in point.values.items()
    ]
    client.log_batch(run, tags=tags)
    for start in range(0, len(params), _PARAMS):
        client.log_batch(run, params=params[start : start + _PARAMS])
    for start in range(0, len(metrics), _METRICS):
        client.log_batch(run, metrics=metrics[start : start + _METRICS])
    if found.ended is None:
        client.update_run(run, status=_STATUS.get(found.state, "RUNNING"))
    else:
        client.set_terminated(run, _STATUS[found.state], _ms(found.ended))


def _there(client: Any, experiment: str, name: str) -> Any:
    """The MLflow run that an earlier export made of this run."""
    quoted = name.replace("'", "\\'")
    found = client.search_runs([experiment], filter_string=f"tags.`{_NAMED}` = '{quoted}'", max_results=1)
    return found[0] if found else None


def _final(point: Point) -> Point:
    """Seconds of an epoch and of a run have the same name; the run's get a different one here."""
    return Point(point.epoch, point.step, point.at, {f"final_{key}": value for key, value in point.values.items()})


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence MLflow's hundred lines about creating its tables."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
