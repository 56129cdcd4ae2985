// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clocks = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const brief = (value) => short.format(value);

export const DASH = "–";

export function count(value) {
  if (value == null || !Number.isFinite(value)) return DASH;
  if (value < 1e6) return whole.format(value);
  return value < 1e9 ? `${digits(value / 1e6)} M` : `${digits(value / 1e9)} G`;
}

/** Three digits that count. */
export function digits(value) {
  if (value >= 100 || value === 0) return whole.format(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

export function rate(value) {
  if (value == null || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : count(value);
}

/** Of a call: seconds in, two or three digits out. */
export function latency(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return DASH;
  if (seconds < 1e-3) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  return `${digits(seconds)} s`;
}

/** Of a clock: how long something has been, or will be. */
export function age(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return DASH;
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))}s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}m ${pad(Math.floor(seconds % 60))}s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours}h ${pad(minutes % 60)}m` : `${Math.floor(hours / 24)}d ${hours % 24}h`;
}

const pad = (value) => String(value).padStart(2, "0");

export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return DASH;
  if (value < 1024) return `${value} B`;
  if (value < 1024 ** 2) return `${digits(value / 1024)} KB`;
  return value < 1024 ** 3 ? `${digits(value / 1024 ** 2)} MB` : `${digits(value / 1024 ** 3)} GB`;
}

export const clock = (when) => clocks.format(when);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
