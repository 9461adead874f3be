// Live pages: a page asks the server for its data again, and shows what has changed.

const LEAST_SECONDS = 5; // the server asks Slurm for the states of jobs each time
const IDLE_SHARE = 10; // a long run takes a core of the server for a while: wait ten times as long

/** Call `take` with the data at `address` again and again, while the tab is visible. */
async function poll(address, take) {
  let wait = LEAST_SECONDS;
  for (;;) {
    await sleep(wait);
    await shown();
    const start = performance.now();
    let fresh = null;
    try {
      const response = await fetch(address);
      if (response.ok) fresh = await response.json();
      else status(`the server refuses: ${(await response.text()) || "open its new address"}`);
      if (response.status === 403) return; // a new server has a new token
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      status("not connected: trying again"); // the server is away, or the computer slept
    }
    if (fresh) {
      status("live");
      take(fresh);
    }
    wait = Math.max(LEAST_SECONDS, (IDLE_SHARE * (performance.now() - start)) / 1000);
  }
}

function sleep(seconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000 * seconds);
  });
}

/** Wait until the tab is visible. */
function shown() {
  return new Promise((resolve) => {
    if (!document.hidden) resolve();
    else document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}

function status(text) {
  document.querySelector("#connection").textContent = text;
}
