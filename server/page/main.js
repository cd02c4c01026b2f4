// The page's wires: forms, keys, and the clock that asks for the gauges.

import { Refused, fetchMetrics, fetchModel } from "./api.js";
import { Chat } from "./chat.js";
import { Gauges } from "./gauges.js";
import { Settings } from "./settings.js";

const TICK = 1000; // ms between two looks at the gauges
const NARROW = matchMedia("(max-width: 56rem)");

const elements = new Map();
const page = (id) => {
  if (!elements.has(id)) elements.set(id, document.getElementById(id));
  return elements.get(id);
};

const settings = new Settings(page);
const chat = new Chat(page, settings);
const gauges = new Gauges(page);

// -- the composer ---------------------------------------------------------------------------------------------------

const message = page("message");

function fit() {
  message.style.height = "auto"; // by script: the policy forbids style attributes, not this
  message.style.height = `${message.scrollHeight}px`;
}

function send() {
  const text = message.value;
  if (!text.trim() || chat.isRunning) return;
  message.value = "";
  fit();
  chat.send(text);
}

message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
page("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
page("stop").addEventListener("click", () => chat.stop());
page("clear").addEventListener("click", () => {
  chat.clear();
  message.focus();
});
page("ideas").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement && !chat.isRunning) chat.send(event.target.textContent);
});

// -- the settings ---------------------------------------------------------------------------------------------------

function open(isOpen) {
  page("settings").dataset.open = isOpen;
  page("toggle").setAttribute("aria-expanded", isOpen);
}

page("toggle").addEventListener("click", () => open(page("settings").dataset.open !== "true"));
NARROW.addEventListener("change", () => open(!NARROW.matches));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (NARROW.matches && page("settings").dataset.open === "true") {
    open(false);
    page("toggle").focus();
  } else {
    chat.stop();
  }
});
page("sampling").addEventListener("submit", (event) => event.preventDefault());
open(!NARROW.matches);

// -- the server -----------------------------------------------------------------------------------------------------

let model = null;
let deafTo = null; // the key with which /metrics is refused, or is not there: asked again with another one

function note(text) {
  page("gauges-note").textContent = text;
  page("gauges-note").hidden = !text;
}

function state(name, text) {
  page("model").dataset.state = name;
  page("model-name").textContent = text;
}

async function lookAtModel() {
  try {
    model ??= await fetchModel(settings.key);
    state("ready", model.name);
    page("model").title = `context of ${model.context.toLocaleString("en")} tokens`;
    document.title = `${model.name} · jaxserve`;
  } catch (error) {
    const words = { 401: "needs an API key", 503: "loading …" };
    state(error instanceof Refused ? "waiting" : "away", words[error.status] ?? "not reached");
  }
}

async function lookAtGauges() {
  const key = settings.key;
  if (deafTo === key) return;
  try {
    gauges.show(await fetchMetrics(key), performance.now() / 1000);
    note("");
    if (model) state("ready", model.name);
  } catch (error) {
    gauges.clear();
    if (!(error instanceof Refused)) {
      state("away", "not reached");
      model = null; // another one may come back
    } else if ([401, 403, 404].includes(error.status)) {
      deafTo = key;
      note(error.status === 404 ? "This server shows no metrics here." : "The gauges need a key: put it under Settings, Access.");
    }
  }
}

async function tick() {
  if (!document.hidden) {
    if (model === null) await lookAtModel();
    await lookAtGauges();
  }
  setTimeout(tick, TICK);
}

tick();
message.focus();
