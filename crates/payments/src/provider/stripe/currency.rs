//! Currencies whose minor unit is another at Stripe than in ISO 4217, by <https://docs.stripe.com/currencies>.
//!
//! An amount here is in minor units of ISO 4217. Where Stripe counts in others, the same number is another sum of money; and
//! where it wants the last digit of three to be zero, some are none. Both are refused rather than converted: the number
//! that a client sent is then the number that the provider lists.

/// Counted in whole units at Stripe, in hundredths by ISO 4217.
const WHOLE: [&str; 1] = ["MGA"];
/// Counted in hundredths at Stripe, in whole units by ISO 4217.
const HUNDREDTHS: [&str; 2] = ["ISK", "UGX"];
/// Counted in thousandths whose last digit has to be zero.
const THOUSANDTHS: [&str; 7] = ["BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"];

/// Says whether a minor unit of this currency is the same at Stripe.
pub(super) fn is_the_same(code: &str) -> bool {
    !WHOLE.contains(&code) && !HUNDREDTHS.contains(&code) && !THOUSANDTHS.contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::currency;

    #[test]
    fn each_currency_that_is_refused_is_one() {
        for code in WHOLE.iter().chain(&HUNDREDTHS).chain(&THOUSANDTHS) {
            assert!(currency::is_known(code) && !is_the_same(code), "{code}");
        }
    }

    #[test]
    fn what_both_count_alike_is_taken() {
        // In hundredths, and in whole units.
        for code in ["EUR", "USD", "GBP", "JPY", "KRW", "VND", "XAF", "CLP"] {
            assert!(currency::is_known(code) && is_the_same(code), "{code}");
        }
    }
}
