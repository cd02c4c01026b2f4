// Prometheus' text -> five numbers, and the numbers on the page.

const WINDOW = 30; // readings that the line and the acceptance look back on

/** Metric name -> the sum of its samples, over all labels. */
export function parseMetrics(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{.*\})? +(\S+)/.exec(line);
    if (match) sums.set(match[1], (sums.get(match[1]) ?? 0) + Number(match[2]));
  }
  return sums;
}

/** What the gauges need of one scrape, `time` in seconds. */
export function reading(sums, time) {
  const of = (name) => sums.get(`jaxserve:${name}`) ?? 0;
  return {
    time,
    running: of("num_requests_running"),
    queued: of("num_requests_waiting"),
    pool: of("kv_cache_usage_perc"), // a share, 0 to 1, as vLLM names it
    tokens: of("generation_tokens_total"),
    drafts: of("spec_decode_num_draft_tokens_total"),
    accepted: of("spec_decode_num_accepted_tokens_total"),
  };
}

/** Tokens per second between two readings; a counter that fell means a new server. */
export function rate(before, now) {
  const seconds = now.time - before.time;
  return seconds > 0 && now.tokens >= before.tokens ? (now.tokens - before.tokens) / seconds : 0;
}

/** Share of the drafts accepted: lately, else ever, else null. */
export function acceptance(first, now) {
  const drafts = now.drafts - first.drafts;
  if (drafts > 0) return (now.accepted - first.accepted) / drafts;
  return now.drafts > 0 ? now.accepted / now.drafts : null;
}

const percent = (share) => `${Math.round(share * 100)}%`;
const short = (number) => (number >= 100 ? Math.round(number) : Math.round(number * 10) / 10).toLocaleString("en");

export class Gauges {
  constructor(page) {
    this.page = page; // id -> element
    this.readings = [];
    this.rates = [];
  }

  show(text, time) {
    const now = reading(parseMetrics(text), time);
    const before = this.readings.at(-1) ?? now;
    this.readings = [...this.readings, now].slice(-WINDOW);
    this.rates = [...this.rates, rate(before, now)].slice(-WINDOW);
    const accepted = acceptance(this.readings[0], now);
    this.page("running").textContent = now.running;
    this.page("queued").textContent = now.queued;
    this.page("pool").textContent = percent(now.pool);
    this.page("pool-meter").value = now.pool;
    this.page("rate").textContent = short(this.rates.at(-1));
    this.page("acceptance").textContent = accepted === null ? "–" : percent(accepted);
    this.draw();
  }

  draw() {
    const most = Math.max(...this.rates, 1);
    const points = this.rates.map((value, i) => `${(i + WINDOW - this.rates.length) * (60 / (WINDOW - 1))},${15 - (14 * value) / most}`);
    this.page("rate-line").firstElementChild.setAttribute("points", points.join(" "));
  }

  clear() {
    this.readings = [];
    this.rates = [];
    for (const id of ["running", "queued", "pool", "rate", "acceptance"]) this.page(id).textContent = "–";
    this.page("pool-meter").value = 0;
    this.draw();
  }
}
