"""Train your own model on your own tasks with your own reward, in a few lines of your own script.

    python examples/own_task.py MODEL_FOLDER        # any causal language model in Hugging Face format

The functions are imported again by the other processes of the run, so they live at the top level of a file.
"""

import sys

import asyncrl


def tasks():
    for a in range(10):
        for b in range(10):
            yield {"prompt": f"0{a}+0{b}=", "answer": str(a + b)}


async def reward(task, text):
    return float(text.split(">")[-1] == task.data["answer"])


if __name__ == "__main__":
    overrides = [f"model.path={sys.argv[1]}", "run.name=own-task", *sys.argv[2:]]
    summary = asyncrl.train("examples/own_task.yaml", overrides, tasks=tasks, reward=reward)
    print(
        f"reward {summary['reward_start']:.2f} -> {summary['reward_end']:.2f} in {summary['train_s']:.0f} s"
    )
