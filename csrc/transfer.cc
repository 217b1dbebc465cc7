#include "transfer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "progress.h"

namespace stepwell {

namespace {

constexpr uint32_t kGateClosed = 1u << 31;

// Longer than this is no limit: keeps the arithmetic of time points from overflowing.
constexpr double kLongestWait_s = 1e8;

}  // namespace

// ---- Gate ------------------------------------------------------------------------------------------------------

bool Gate::enter() noexcept {
  if ((state_.fetch_add(1, std::memory_order_acquire) & kGateClosed) == 0) return true;
  leave();
  return false;
}

void Gate::leave() noexcept {
  // Release: what was stored inside happens before close() returns.
  if (state_.fetch_sub(1, std::memory_order_release) == (kGateClosed | 1u)) state_.notify_all();
}

void Gate::close() noexcept {
  uint32_t seen = state_.fetch_or(kGateClosed, std::memory_order_acq_rel) | kGateClosed;
  while (seen != kGateClosed) {
    state_.wait(seen, std::memory_order_acquire);
    seen = state_.load(std::memory_order_acquire);
  }
}

// ---- Waker -----------------------------------------------------------------------------------------------------

Waker::Waker() : event_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Waker::~Waker() {
  // Without the mutex: nobody else is left, but in a forked child it may be as another thread had it.
  if (event_fd_ >= 0) ::close(event_fd_);
}

int Waker::fileno() const noexcept {
  std::lock_guard lock(mutex_);
  return event_fd_;
}

void Waker::reserve() {
  std::lock_guard lock(mutex_);
  // By doubling: a waiter at a time must not copy the list each time.
  if (ready_.capacity() <= promised_) ready_.reserve(std::max<size_t>(8, 2 * promised_));
  ++promised_;
}

void Waker::unreserve() noexcept {
  std::lock_guard lock(mutex_);
  --promised_;
}

void Waker::push(uint64_t token) noexcept {
  std::lock_guard lock(mutex_);
  ready_.push_back(token);
  if (event_fd_ < 0) return;
  const uint64_t one = 1;
  // Fails only where the counter is at its end: then the descriptor is readable as it is.
  [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
}

std::vector<uint64_t> Waker::drain() {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> tokens(ready_);
  promised_ -= ready_.size();
  ready_.clear();
  if (event_fd_ >= 0) {
    uint64_t counter = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_fd_, &counter, sizeof counter);
  }
  return tokens;
}

void Waker::close() noexcept {
  std::lock_guard lock(mutex_);
  if (event_fd_ >= 0) ::close(event_fd_);
  event_fd_ = -1;
}

// ---- Watchers --------------------------------------------------------------------------------------------------

void Watchers::add(const std::shared_ptr<Waker>& waker, uint64_t token) {
  entries_.push_back({waker, token});
  try {
    waker->reserve();
  } catch (...) {
    entries_.pop_back();
    throw;
  }
}

void Watchers::remove(const Waker* waker, uint64_t token) noexcept {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.waker.get() == waker && entry.token == token;
  });
  if (found == entries_.end()) return;
  found->waker->unreserve();
  entries_.erase(found);
}

void Watchers::tell() noexcept {
  for (const Entry& entry : entries_) entry.waker->push(entry.token);
  entries_.clear();
}

// ---- Inbox -----------------------------------------------------------------------------------------------------

Inbox::Inbox(size_t capacity) : capacity_(capacity) {
  ready_.reserve(capacity);  // push() must not allocate
  event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Inbox::~Inbox() { ::close(event_fd_); }

bool Inbox::try_reserve() {
  std::lock_guard lock(mutex_);
  if (closed_ || reserved_ >= capacity_) return false;
  ++reserved_;
  return true;
}

void Inbox::unreserve() {
  std::lock_guard lock(mutex_);
  --reserved_;
}

void Inbox::push(const Completion& completion) noexcept {
  std::lock_guard lock(mutex_);
  if (closed_) {
    --reserved_;
    return;
  }
  ready_.push_back(completion);
  const uint64_t one = 1;
  // Fails only where the counter is at its end: then the descriptor is readable as it is.
  [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
  watchers_.tell();
}

bool Inbox::try_post(const Completion& completion) {
  if (!try_reserve()) return false;
  push(completion);
  return true;
}

size_t Inbox::poll(size_t most, std::vector<Completion>* out) {
  std::lock_guard lock(mutex_);
  const size_t count = std::min(most, ready_.size());
  const auto end = ready_.begin() + static_cast<std::ptrdiff_t>(count);
  out->insert(out->end(), ready_.begin(), end);
  ready_.erase(ready_.begin(), end);
  reserved_ -= count;
  if (ready_.empty()) {
    uint64_t counter = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_fd_, &counter, sizeof counter);
  }
  return count;
}

void Inbox::close() noexcept {
  std::lock_guard lock(mutex_);
  closed_ = true;
  reserved_ -= ready_.size();
  ready_.clear();
  uint64_t counter = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_fd_, &counter, sizeof counter);
  watchers_.tell();
}

bool Inbox::is_closed() const noexcept {
  std::lock_guard lock(mutex_);
  return closed_;
}

InboxCounts Inbox::counts() const noexcept {
  std::lock_guard lock(mutex_);
  return {capacity_, reserved_, ready_.size()};
}

bool Inbox::watch(const std::shared_ptr<Waker>& waker, uint64_t token) {
  std::lock_guard lock(mutex_);
  if (closed_ || !ready_.empty()) return false;
  watchers_.add(waker, token);
  return true;
}

void Inbox::unwatch(const Waker* waker, uint64_t token) noexcept {
  std::lock_guard lock(mutex_);
  watchers_.remove(waker, token);
}

// ---- RetireList ------------------------------------------------------------------------------------------------

void RetireList::reserve(size_t count) {
  std::lock_guard lock(mutex_);
  promised_ += count;
  tokens_.reserve(promised_);
}

void RetireList::unreserve(size_t count) noexcept {
  std::lock_guard lock(mutex_);
  promised_ -= count;
}

void RetireList::push(uint64_t token) noexcept {
  std::lock_guard lock(mutex_);
  tokens_.push_back(token);
}

std::vector<uint64_t> RetireList::drain() {
  std::lock_guard lock(mutex_);
  promised_ -= tokens_.size();
  std::vector<uint64_t> tokens(tokens_);
  tokens_.clear();
  return tokens;
}

// ---- Transfer --------------------------------------------------------------------------------------------------

Transfer::Transfer(TransferSpec spec)
    : spec_(std::move(spec)), progress_(std::make_unique<Progress>().release(), [](Progress* progress) {
        std::default_delete<Progress>{}(progress);
      }) {}

bool Transfer::done() const noexcept {
  std::lock_guard lock(mutex_);
  return progress_->done;
}

bool Transfer::source_released() const noexcept { return progress_->source_released.load(std::memory_order_acquire); }

uint32_t Transfer::layers_done() const noexcept { return progress_->layers_done.load(std::memory_order_acquire); }

template <typename Predicate>
bool Transfer::wait_for(double timeout_s, Predicate is_over) const {
  // The workers did not come along into a forked child: nothing would ever wake it.
  if (progress_->pid != ::getpid()) return false;
  std::unique_lock lock(mutex_);
  if (timeout_s < 0 || timeout_s > kLongestWait_s) {
    condition_.wait(lock, is_over);
    return true;
  }
  return condition_.wait_for(lock, std::chrono::duration<double>(timeout_s), is_over);
}

bool Transfer::wait(double timeout_s) const {
  return wait_for(timeout_s, [this] { return progress_->done; });
}

bool Transfer::wait_decided(double timeout_s) const {
  return wait_for(timeout_s, [this] { return progress_->done || progress_->gate_closed; });
}

void Transfer::cancel() noexcept { progress_->cancelled.store(true, std::memory_order_relaxed); }

void Transfer::close_gate() noexcept {
  gate_.close();
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < spec_.pages.size(); ++i) {
    if (spec_.pages[i].roles[kPoolColumn] == Role::kUnused || progress_->pool_over[i]) continue;
    if (progress_->status[i] == Status::kPending) progress_->status[i] = Status::kDeadline;
  }
  progress_->source_released.store(true, std::memory_order_release);
  progress_->gate_closed = true;
  progress_->watchers.tell();
  condition_.notify_all();
}

void Transfer::abandon(Status status) noexcept {
  cancel();
  gate_.close();
  std::lock_guard lock(mutex_);
  if (progress_->done) return;
  Completion completion{spec_.tag, static_cast<uint32_t>(spec_.pages.size()), 0, Status::kOk};
  for (Status& page : progress_->status) {
    if (page == Status::kPending) page = status;
    if (page == Status::kOk) {
      ++completion.ok_pages;
    } else if (completion.status == Status::kOk) {
      completion.status = page;
    }
  }
  if (progress_->inbox != nullptr) progress_->inbox->push(completion);
  progress_->inbox = nullptr;
  progress_->source_released.store(true, std::memory_order_release);
  progress_->gate_closed = true;
  progress_->watchers.tell();
  condition_.notify_all();
}

bool Transfer::decided() const noexcept {
  std::lock_guard lock(mutex_);
  return progress_->done || progress_->gate_closed;
}

bool Transfer::watch(const std::shared_ptr<Waker>& waker, uint64_t token) {
  std::lock_guard lock(mutex_);
  if (progress_->done || progress_->gate_closed) return false;
  progress_->watchers.add(waker, token);
  return true;
}

void Transfer::unwatch(const Waker* waker, uint64_t token) noexcept {
  std::lock_guard lock(mutex_);
  progress_->watchers.remove(waker, token);
}

std::vector<Status> Transfer::page_status() const {
  std::lock_guard lock(mutex_);
  return progress_->status;
}

std::vector<uint8_t> Transfer::landed() const {
  std::lock_guard lock(mutex_);
  return progress_->landed;
}

uint8_t Transfer::asked() const noexcept { return progress_->asked.load(std::memory_order_relaxed); }

uint64_t Transfer::bytes_moved() const noexcept { return progress_->bytes_moved.load(std::memory_order_relaxed); }

double Transfer::seconds() const noexcept {
  std::lock_guard lock(mutex_);
  return progress_->seconds;
}

}  // namespace stepwell
