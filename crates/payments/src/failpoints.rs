//! The domain's failpoints, in whichever process drives a payment or refund on.

/// Key, payment and request are committed, nothing is sent.
pub const BEFORE_SEND: &str = "payments.before_send";
/// The provider has prepared the charge, nothing of it is written.
pub const AFTER_PREPARE: &str = "payments.after_prepare";
/// What it was prepared as is committed, nothing is charged.
pub const AFTER_REFERENCE: &str = "payments.after_reference";
/// The provider has answered the charge, nothing of it is written.
pub const AFTER_ANSWER: &str = "payments.after_answer";
/// It is committed that nobody sends any more, nothing is canceled.
pub const AFTER_CANCELING: &str = "payments.after_canceling";
/// The provider has answered the cancel, nothing of it is written.
pub const AFTER_CANCEL: &str = "payments.after_cancel";
/// The outcome is committed, nobody is told.
pub const AFTER_SETTLE: &str = "payments.after_settle";
/// Key, refund and request are committed, nothing is sent.
pub const REFUND_BEFORE_SEND: &str = "refunds.before_send";
/// The provider has answered the refund, nothing of it is written.
pub const REFUND_AFTER_ANSWER: &str = "refunds.after_answer";
/// The refund's outcome is committed, nobody is told.
pub const REFUND_AFTER_SETTLE: &str = "refunds.after_settle";
