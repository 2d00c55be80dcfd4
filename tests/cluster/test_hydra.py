"""A program of Hydra that trains in several processes: one job, several jobs, and an error."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import logging, os
    import hydra
    import torch
    import stratagem
    from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly
    from torch.utils.data import DataLoader, TensorDataset

    class Model(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.global_rank == self.failing_rank:
                raise ValueError("out of order")
            return super().training_step(batch, batch_idx)

    @hydra.main(version_base=None, config_path="conf", config_name="config")
    def main(config):
        batches = joined_batches(10, 16)
        tensors = [torch.cat(parts) for parts in zip(*batches)]
        trainer = stratagem.Trainer(
            strategy=config.strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False,
        )
        model = Model(lr=config.lr)
        model.failing_rank = config.failing_rank
        trainer.fit(model, DataLoader(TensorDataset(*tensors), 8))
        difference = relative_difference(model.state_dict(), train_plainly(batches, lr=config.lr)[0])
        logging.getLogger("mine").info("rank %d", trainer.global_rank)
        if trainer.is_global_zero:
            print("TRAINED", config.lr, trainer.world_size, difference < 1e-6, os.path.basename(os.getcwd()), flush=True)

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def program(tmp_path):
    """Write the program, and return a function that runs it with arguments."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("strategy: ddp\nlr: 0.005\nfailing_rank: -1\n")

    def run(*arguments):
        command = [sys.executable, "train.py", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=720, check=False
        )

    return run


def test_both_ranks_share_the_folder_of_the_job(program, tmp_path):
    """Though the job works in it, and its name has characters that Hydra's grammar knows."""
    result = program("lr=0.002", "hydra.run.dir='outputs/lr=0.002,it\\'s'", "hydra.job.chdir=true")

    folder = tmp_path / "outputs" / "lr=0.002,it's"
    assert "TRAINED 0.002 2 True lr=0.002,it's" in result.stdout, result.stderr
    assert result.stdout.count("TRAINED") == 1
    assert os.listdir(tmp_path / "outputs") == [folder.name]
    assert sorted(os.listdir(folder)) == [".hydra", "run.lock", "train.log", "train_rank_1.log"]
    assert "rank 0" in (folder / "train.log").read_text()
    assert "rank 1" not in (folder / "train.log").read_text()
    assert "rank 1" in (folder / "train_rank_1.log").read_text()
    assert "train_rank" not in (folder / ".hydra" / "hydra.yaml").read_text()


@pytest.mark.sweep(guard="tests/cluster/test_hydra.py::test_both_ranks_share_the_folder_of_the_job")
def test_an_error_of_a_rank_is_shown_with_its_cause(program):
    result = program("failing_rank=1")

    assert result.returncode == 1
    assert "rank 1 failed with ValueError: out of order" in result.stderr
    assert "Connection" not in result.stderr


@pytest.mark.sweep(guard="tests/cluster/test_hydra.py::test_both_ranks_share_the_folder_of_the_job")
def test_several_jobs_need_processes_that_end_with_each(program, tmp_path):
    result = program("--multirun", "lr=0.002,0.004")
    assert result.returncode == 1
    assert "Hydra carries out several jobs in this program (--multirun)" in result.stderr
    assert 'set strategy="ddp_fork"' in result.stderr
    assert "TRAINED" not in result.stdout

    result = program("--multirun", "strategy=ddp_fork", "lr=0.002,0.004")
    assert [line for line in result.stdout.splitlines() if line.startswith("TRAINED")] == [
        f"TRAINED {lr} 2 True {tmp_path.name}" for lr in (0.002, 0.004)
    ], result.stderr
