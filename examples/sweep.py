"""A sweep with `import dtt`, and its plot: `python examples/sweep.py`."""

import matplotlib.pyplot as plt
import pyarrow.compute as pc

import dtt

RATES = (0.0007, 0.0014, 0.0028, 0.0056)


def main() -> None:
    """Train the quickstart with several learning rates, and plot the validation losses."""
    for lr in RATES:
        # A job that is done is not trained again, so the script can be interrupted and repeated.
        job = dtt.train(dtt.load("quickstart", name=f"lr-{lr}", optim={"lr": lr}))
        records = job.metrics
        validated = records.filter(pc.equal(records["kind"], "eval"))
        plt.plot(validated["step"], validated["loss"], label=f"{lr:g}")
    plt.xlabel("step")
    plt.ylabel("validation loss (nats)")
    plt.legend(title="learning rate")
    plt.savefig("sweep.png")


if __name__ == "__main__":
    main()
