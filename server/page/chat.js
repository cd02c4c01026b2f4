// The conversation: what was said, how it stands on the page, and the one answer that may be running.

import { streamChat } from "./api.js";
import { copy, show } from "./text.js";

const REASONS = { length: "ended by max tokens or the context", abort: "ended by the server", error: "failed" };

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

export class Chat {
  constructor(page, settings) {
    this.page = page;
    this.settings = settings;
    this.messages = []; // { role, content, element }
    this.running = null; // AbortController of the answer that is being written
  }

  get isRunning() {
    return this.running !== null;
  }

  send(text) {
    this.page("welcome").hidden = true;
    for (const button of this.page("log").querySelectorAll(".retry")) button.remove();
    this.add("user", text);
    return this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    for (const { element } of this.messages) element.remove();
    this.messages = [];
    this.page("welcome").hidden = false;
  }

  /** Draws the last answer again, from the same conversation. */
  retry() {
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop().element.remove();
    return this.answer();
  }

  add(role, content) {
    const element = make("article", `message ${role}`);
    element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    element.append(make("div", "text"));
    show(element.firstElementChild, content);
    this.page("log").append(element);
    element.scrollIntoView({ block: "end" });
    const message = { role, content, element };
    this.messages.push(message);
    return message;
  }

  async answer() {
    const said = this.messages.filter(({ failed }) => !failed).map(({ role, content }) => ({ role, content }));
    const message = this.add("assistant", "");
    const controller = new AbortController();
    const begun = performance.now();
    const told = { first: null, reason: null, seed: null, usage: null };
    this.begin(controller, message);
    let problem = null;
    try {
      const body = this.settings.request(said);
      for await (const part of streamChat(body, this.settings.key, controller.signal)) {
        if (part.text) told.first ??= performance.now();
        message.content += part.text;
        told.reason ??= part.reason;
        told.seed ??= part.seed;
        told.usage ??= part.usage;
        this.paint(message);
      }
    } catch (error) {
      problem = error;
    }
    this.end(controller, message);
    if (!message.element.isConnected) return; // the chat was cleared
    if (problem && problem.name !== "AbortError") this.fail(message, problem);
    const seconds = (performance.now() - begun) / 1000;
    this.foot(message, facts(told, seconds, problem?.name === "AbortError"));
  }

  begin(controller, message) {
    this.running = controller;
    message.element.classList.add("streaming");
    this.page("log").setAttribute("aria-busy", "true"); // screen readers read the whole answer, not its pieces
    this.page("stop").hidden = false;
    this.page("send").hidden = true;
  }

  end(controller, message) {
    show(message.element.firstElementChild, message.content);
    message.element.classList.remove("streaming");
    if (this.running !== controller) return;
    this.running = null;
    this.page("log").removeAttribute("aria-busy");
    this.page("send").hidden = false;
    if (document.activeElement === this.page("stop")) this.page("message").focus();
    this.page("stop").hidden = true;
  }

  /** At most once a frame, however many tokens a frame brings. */
  paint(message) {
    if (message.isDirty) return;
    message.isDirty = true;
    requestAnimationFrame(() => {
      message.isDirty = false;
      const log = this.page("log");
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      show(message.element.firstElementChild, message.content);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    });
  }

  fail(message, problem) {
    message.failed = !message.content; // an answer that never began is no part of the conversation
    const error = make("p", "error", problem.message);
    error.setAttribute("role", "alert");
    message.element.append(error);
  }

  foot(message, text) {
    const foot = make("div", "foot");
    if (text) foot.append(make("span", "facts", text));
    if (message.content) {
      const button = make("button", "quiet", "Copy");
      button.addEventListener("click", async () => {
        button.textContent = (await copy(message.content)) ? "Copied" : "Not copied";
        setTimeout(() => (button.textContent = "Copy"), 1500);
      });
      foot.append(button);
    }
    const again = make("button", "quiet retry", "Retry");
    again.addEventListener("click", () => this.isRunning || this.retry());
    foot.append(again);
    for (const button of foot.querySelectorAll("button")) button.type = "button";
    message.element.append(foot);
    foot.scrollIntoView({ block: "nearest" });
  }
}

function facts({ first, reason, seed, usage }, seconds, isStopped) {
  const parts = [];
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`, `${seconds.toFixed(1)} s`);
    if (first !== null && usage.completion_tokens > 1) parts.push(`${Math.round(usage.completion_tokens / seconds)} tokens/s`);
  }
  if (seed !== null) parts.push(`seed ${seed}`);
  if (isStopped) parts.push("stopped");
  if (reason in REASONS) parts.push(REASONS[reason]);
  return parts.join(" · ");
}
