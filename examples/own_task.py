"""Train your own model on your own tasks with your own reward, in a few lines of your own script.

    python examples/own_task.py MODEL_FOLDER [key=value ...]     # any causal language model in Hugging Face format

The other processes of the run import this file for its functions. own_task.yaml is the same for the command line.
"""

import sys

import asyncrl


def tasks():
    return [{"prompt": f"0{a}+0{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


async def reward(task, text):
    return float(text.split(">")[-1] == task.data["answer"])


if __name__ == "__main__":
    result = asyncrl.train(
        model=sys.argv[1],
        tasks=tasks,
        reward=reward,
        max_staleness=2,
        run={"name": "own-task", "versions": 20},
        batch={"groups": 8, "group_size": 4},
        generator={"slots": 32, "max_tokens": 16, "max_length": 64},
        learner={"optimizer": {"lr": 1e-4}},
        algorithm={"advantage": "rloo"},
        overrides=sys.argv[2:],
    )
    print(f"reward {result['reward_start']:.2f} -> {result['reward_end']:.2f} in {result['train_s']:.0f} s")
    print(f"{len(result.rows)} rows of metrics; the model is in {result.model}")
