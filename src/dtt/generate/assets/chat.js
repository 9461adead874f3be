// A conversation with a model, or a text that it continues. The page keeps the messages: the
// server knows none between two requests.

const data = JSON.parse(document.querySelector("#data").textContent);
let messages = [];
let connection = null;

const log = el("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: 0 });
const input = el("textarea", { id: "message", rows: 3 });
const system = el("textarea", { id: "system", rows: 2 });
const range = { min: 0, max: 100, step: "any" };
const temperature = el("input", { id: "temperature", type: "number", ...range });
const limit = el("input", { id: "limit", type: "number", min: 1, step: 1 });
const send = el("button", { type: "submit" }, data.chat ? "Send" : "Continue");
const stop = el("button", { type: "button", disabled: true, onclick: abort }, "Stop");
const reset = el("button", { type: "button", onclick: forget }, "Reset");
temperature.value = data.temperature;
limit.value = data.max_tokens;

function add(kind, text) {
  const element = el("div", { class: `message ${kind}` }, text);
  log.append(element);
  // Not scrollIntoView: a message behind the form, which sticks to the bottom, counts as visible.
  scrollTo(0, document.documentElement.scrollHeight);
  return element;
}

/** Show the text of an answer so far, and follow it unless the reader has scrolled up. */
function show(element, text) {
  const page = document.documentElement;
  const following = scrollY + innerHeight > page.scrollHeight - 50;
  element.textContent = text;
  if (following) scrollTo(0, page.scrollHeight);
}

function abort() {
  connection?.abort();
}

function forget() {
  abort();
  messages = [];
  log.replaceChildren();
  input.focus();
}

/** The address and the content of the request for the next answer. */
function request() {
  const common = {
    temperature: Number(temperature.value),
    max_tokens: Number(limit.value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!data.chat)
    return ["v1/completions", { ...common, prompt: messages.map((one) => one.content).join("") }];
  const first = system.value ? [{ role: "system", content: system.value }] : [];
  const content = { ...common, messages: [...first, ...messages], drop_oldest_turns: true };
  return ["v1/chat/completions", content];
}

/** Yield the events of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const found = (rest + part.value).split("\n\n");
    rest = found.pop();
    for (const event of found)
      if (event !== "data: [DONE]") yield JSON.parse(event.slice("data: ".length));
  }
}

async function answer(question) {
  const [url, content] = request();
  // An answer that arrives after Reset must not enter the new conversation.
  const conversation = messages;
  const shown = add("assistant busy", "…");
  let text = "";
  const keep = () => {
    show(shown, text);
    shown.classList.remove("busy");
    if (text) conversation.push({ role: "assistant", content: text });
    else shown.remove();
  };
  try {
    const response = await fetch(url, {
      method: "POST",
      body: JSON.stringify(content),
      signal: connection.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) text += choice.delta?.content ?? choice.text ?? "";
      if (text) show(shown, text);
      const dropped = event.usage?.dropped_messages;
      if (dropped) add("notice", `The context is full: the model did not see ${dropped} messages.`);
      if (event.choices[0]?.finish_reason === "length")
        add("notice", "The answer ended at the limit of new tokens or of the context.");
    }
    keep();
  } catch (error) {
    keep();
    if (conversation !== messages) return;
    const lost = "The server does not answer: is dtt chat still running?";
    const known = { AbortError: "Stopped.", TypeError: lost };
    add(error.name === "AbortError" ? "notice" : "bad", known[error.name] ?? error.message);
    if (!text && question) {
      messages.pop(); // a message without an answer would be sent again with the next one
      input.value ||= question.textContent;
      question.remove();
    }
  }
}

async function submit(event) {
  event.preventDefault();
  const text = input.value;
  if (connection || (data.chat && !text.trim())) return;
  connection = new AbortController();
  input.value = "";
  if (text) messages.push({ role: "user", content: text });
  const question = text ? add("user", text) : null;
  [send.disabled, stop.disabled] = [true, false];
  await answer(question);
  connection = null;
  [send.disabled, stop.disabled] = [false, true];
}

const form = el(
  "form",
  { onsubmit: submit },
  el("label", { for: "message" }, data.chat ? "Message" : "Text to continue"),
  input,
  el("div", { class: "buttons" }, send, stop, reset),
);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && abort());

document.querySelector("#page").append(
  el("h1", null, data.model),
  el(
    "div",
    { class: "settings" },
    data.chat && el("label", null, "System prompt", system),
    el("label", null, "Temperature", temperature),
    el("label", null, "New tokens, at most", limit),
  ),
  el("h2", null, data.chat ? "Conversation" : "Text"),
  log,
  form,
);
input.focus();
document.documentElement.dataset.ready = "1";
